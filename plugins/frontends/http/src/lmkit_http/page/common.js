'use strict';
// What all views use: elements, requests with the key, events of streams.
const $ = id => document.getElementById(id);

// An element: its tag with classes ("div.m.user"), its attributes, what is in it.
function make(tag, attributes = {}, ...inside) {
  const [name, ...classes] = tag.split('.'), e = document.createElement(name);
  if (classes.length) e.className = classes.join(' ');
  for (const [key, value] of Object.entries(attributes)) key in e && key !== 'list' ? e[key] = value : e.setAttribute(key, value);
  e.append(...inside); return e;
}

async function api(path, body, signal) {
  const headers = {'content-type': 'application/json'}, key = sessionStorage.getItem('key');
  if (key) headers.authorization = 'Bearer ' + key;
  const r = await fetch(path, {method: body ? 'POST' : 'GET', signal, headers, body: body && JSON.stringify(body)});
  if (r.ok) return r;
  const error = new Error(await r.json().then(d => d.error.message, () => 'the server answered ' + r.status));
  if (r.status === 401) { sessionStorage.removeItem('key'); show_only('keys'); $('key').focus() }
  throw error;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); let held = '';
  for (;;) {
    const {done, value} = await reader.read(); if (done) return;
    const parts = (held + value).split('\n\n'); held = parts.pop();
    for (const part of parts) {
      if (!part.startsWith('data: ') || part === 'data: [DONE]') continue;
      const event = JSON.parse(part.slice(6)); if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

const VIEWS = ['talk', 'engine', 'plugins'];
function show_only(id) { for (const view of [...VIEWS, 'keys']) $(view).hidden = view !== id }

// Follows the newest line only while the reader is at the end: whoever scrolled up is reading something else.
function show(change) {
  const follow = innerHeight + scrollY >= document.body.scrollHeight - 80;
  change(); if (follow) scrollTo(0, document.body.scrollHeight);
}
