// Talking: a conversation with reasoning, tool calls and tokens; or texts, vectors and classes, as the model is made.
const messages = [];
let running = null, refused = [], label = 'Send', work = chat, capabilities = {};

function add(kind, ...inside) { const e = make('div.m.' + kind, {}, ...inside); show(() => $('log').append(e)); return e }

// Text with code between fences apart; what comes is text, never HTML.
function formatted(text) {
  return text.trimStart().split(/^```.*\n?/m).map((part, i) => i % 2 ? make('pre', {}, part.replace(/\n$/, '')) : part);
}

function sampling() {
  const found = {};
  for (const id of ['temperature', 'top_p', 'max_tokens', 'seed']) if ($(id).value !== '') found[id] = +$(id).value;
  if ($('logprobs').checked) Object.assign(found, {logprobs: true, top_logprobs: 5});
  if (!$('think').disabled) found.chat_template_kwargs = {enable_thinking: $('think').checked};
  if ($('tools').value.trim()) {
    try { found.tools = JSON.parse($('tools').value) } catch (e) { throw new Error('the tools are no JSON: ' + e.message) }
  }
  return found;
}

// Tokens that can be asked how likely they were: darker lines below the unlikely ones.
function token({token, logprob, top_logprobs}) {
  const shown = top_logprobs.map(t => (100 * Math.exp(t.logprob)).toFixed(1).padStart(5) + ' %  ' + JSON.stringify(t.token)).join('\n');
  const e = make('span.token', {tabIndex: 0, 'data-top': shown || Math.exp(logprob).toFixed(3)}, token);
  e.style.borderBottomColor = `rgb(200 80 0 / ${1 - Math.exp(logprob)})`; return e;
}

// One answer on the screen, as it grows.
class Answer {
  text = ''; thought = ''; calls = []; usage = null; began = performance.now(); first = 0;
  take(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices[0]; if (!choice) return;
    const d = choice.delta;
    this.first ||= performance.now();  // a call is shown when it is whole: its first token came long before
    if (d.reasoning_content) {
      this.thinking ??= add('think').appendChild(make('details.think', {open: true}, make('summary', {}, 'Reasoning'), make('div')));
      this.thinking.lastChild.textContent = this.thought += d.reasoning_content;
    }
    if (d.content) {
      if (this.thinking && !this.text) this.thinking.open = false;
      this.text += d.content; this.box ??= add('assistant');
      if (!choice.logprobs) this.box.replaceChildren(...formatted(this.text));
    }
    // tokens lie in whole texts, those of calls and markers too: only what is shown is shown
    if (choice.logprobs && d.content) for (const t of choice.logprobs.content) this.box.append(token(t));
    for (const c of d.tool_calls ?? []) {
      const call = this.calls[c.index] ??= {id: c.id, type: 'function', function: {name: c.function.name, arguments: ''}};
      call.function.arguments += c.function.arguments ?? '';
      call.box ??= add('call'); call.box.textContent = call.function.name + '(' + call.function.arguments + ')';
    }
  }
  message() {
    const calls = this.calls.map(({box, ...call}) => call);
    return {role: 'assistant', content: this.text || null, ...(calls.length && {tool_calls: calls})};
  }
  end() {
    const u = this.usage; if (!u) return;
    const seconds = (performance.now() - this.first) / 1000, cached = u.prompt_tokens_details?.cached_tokens;
    const rate = u.completion_tokens > 1 && seconds > 0 ? `, ${((u.completion_tokens - 1) / seconds).toFixed(0)} a second` : '';
    show(() => $('log').append(make('div.usage', {}, `${u.completion_tokens} tokens${rate}, first after ${((this.first - this.began) / 1000).toFixed(2)} s, ` +
      `prompt ${u.prompt_tokens}${cached ? ` (${cached} cached)` : ''}`)));
  }
}

// Asks for what follows the conversation with `turns`, which are a part of it once there is an answer.
async function chat(turns, signal) {
  const system = $('system').value.trim(), answer = new Answer();
  const asked = [...(system ? [{role: 'system', content: system}] : []), ...messages, ...turns];
  const body = {messages: asked, stream: true, stream_options: {include_usage: true}, ...sampling()};
  try {
    for await (const event of events(await api('v1/chat/completions', body, signal))) show(() => answer.take(event));
  } finally {
    if (answer.text || answer.calls.length) messages.push(...turns, answer.message());
  }
  answer.end();
  if (answer.calls.length) ask_for_results(answer.calls);
}

// Who has no tools answers for them by hand.
function ask_for_results(calls) {
  const left = new Map(calls.map(call => [call.id, null]));
  for (const call of calls) {
    const text = make('textarea', {rows: 2, placeholder: 'What ' + call.function.name + ' gives back', 'aria-label': 'Result of ' + call.function.name});
    const send = make('button', {}, 'Give');
    send.onclick = () => {
      left.set(call.id, text.value); text.disabled = true; send.remove();
      if ([...left.values()].some(result => result === null)) return;
      answer_with(() => chat([...left].map(([tool_call_id, content]) => ({role: 'tool', tool_call_id, content})), running.signal));
    };
    show(() => call.box.append(text, send));
  }
  calls[0].box.querySelector('textarea').focus();
}

async function complete([{content}], signal) {
  const box = add('assistant'), {temperature, top_p, seed, max_tokens = 256} = sampling();
  for await (const event of events(await api('v1/completions', {prompt: content, stream: true, max_tokens, temperature, top_p, seed}, signal)))
    show(() => box.textContent += event.choices[0]?.text ?? '');
}
async function embed([{content}], signal) {
  const v = (await (await api('v1/embeddings', {input: content}, signal)).json()).data[0].embedding;
  add('assistant', v.length + ' numbers: ' + v.slice(0, 8).map(x => x.toFixed(4)).join(', ') + (v.length > 8 ? ', ...' : ''));
}
async function classify([{content}], signal) {
  const d = (await (await api('classify', {input: content}, signal)).json()).data[0];
  add('assistant', d.label + ': ' + d.probs.map(x => x.toFixed(4)).join(', '));
}

// Runs one answer, which the button can stop. What was refused leaves the conversation as it was.
async function answer_with(run, text = '', own = null) {
  running = new AbortController(); $('send').textContent = 'Stop';
  try { await run() } catch (e) {
    if (e.name !== 'AbortError') {
      const box = add('error', e.message); refused = [own, box].filter(Boolean); $('text').value ||= text; box.scrollIntoView({block: 'nearest'});
    }
  }
  running = null; $('send').textContent = label;
}

function send() {
  if (running) return running.abort();
  const text = $('text').value.trim(); if (!text) return;
  refused.forEach(box => box.remove()); refused = []; $('text').value = '';
  const own = add('user', text);
  answer_with(() => work([{role: 'user', content: text}], running.signal), text, own);
}

function forget() { running?.abort(); messages.length = 0; refused = []; $('log').replaceChildren(); $('text').focus() }

// What the page offers is what the model does.
function offer(model) {
  const c = capabilities = model.capabilities, tasks = c.tasks; let hint;
  if (tasks.includes('generate')) [work, hint, label] = c.chat ? [chat, 'Say something', 'Send'] : [complete, 'A text to go on with', 'Send'];
  else if (tasks.includes('embed')) [work, hint, label] = [embed, 'A text to embed', 'Embed'];
  else if (tasks.includes('classify')) [work, hint, label] = [classify, 'A text to classify', 'Classify'];
  else { $('form').hidden = true; add('error', 'This server does ' + tasks.join(', ') + ', which has no page: see /v1/models.') }
  $('text').placeholder = hint ?? ''; $('send').textContent = label;
  $('settings').hidden = !tasks.includes('generate'); $('new').hidden = !c.chat;
  for (const [id, there] of [['system', c.chat && c.system], ['tools', c.tools], ['logprobs', c.chat], ['think', c.template_options?.includes('enable_thinking')]]) {
    $(id).disabled = !there; $(id).closest('label').hidden = !there;
  }
}
