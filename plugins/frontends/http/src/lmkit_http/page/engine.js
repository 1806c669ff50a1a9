// The engine as it runs: /metrics, looked at once a second while somebody looks at this view.
const LOOKS = 120, looks = [];
const FIGURES = [
  ['requests running', now => now.lmkit_requests_running],
  ['requests waiting', now => now.lmkit_requests_waiting],
  ['KV cache', now => 100 * now.lmkit_kv_usage_ratio, ' %', 100],
  ['output tokens a second', (now, then) => rate('lmkit_engine_output_tokens_total', now, then)],
  ['prompt tokens a second', (now, then) => rate('lmkit_engine_prompt_tokens_total', now, then)],
  ['steps a second', (now, then) => rate('lmkit_steps_total', now, then)],
  ['of prompts found in the cache', now => share('lmkit_prefix_cache_hits_total', 'lmkit_prefix_cache_queries_total', now), ' %', 100],
  ['of guessed tokens right', now => share('lmkit_accepted_draft_tokens_total', 'lmkit_draft_tokens_total', now), ' %', 100],
];
const rate = (name, now, then) => then && now[name] >= then[name] ? (now[name] - then[name]) / (now.at - then.at) : null;
const share = (part, whole, now) => now[whole] ? 100 * now[part] / now[whole] : null;

// Figures without labels but the model's, added up.
function figures(text) {
  const found = {at: performance.now() / 1000};
  for (const line of text.split('\n')) {
    const parts = /^(\w+)(?:{model_name="[^"]*"})? (\S+)/.exec(line);
    if (parts) found[parts[1]] = (found[parts[1]] ?? 0) + +parts[2];
  }
  return found;
}

function line(values, top) {
  const known = values.filter(v => v !== null && v !== undefined), most = top ?? Math.max(...known, 1e-9);
  const points = values.map((v, i) => [i + LOOKS - values.length, 30 - 28 * Math.min((v ?? 0) / most, 1)]);
  const path = 'M' + points.map(p => p.map(x => x.toFixed(1)).join(',')).join('L');
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', `0 0 ${LOOKS} 31`); svg.setAttribute('preserveAspectRatio', 'none'); svg.setAttribute('role', 'img');
  for (const [name, d] of [['under', `${path}L${LOOKS - 1},31L${points[0][0]},31Z`], ['', path]]) {
    const e = svg.appendChild(document.createElementNS(svg.namespaceURI, 'path')); e.setAttribute('class', name); e.setAttribute('d', d);
  }
  return svg;
}

function draw() {
  const plots = FIGURES.map(([name, of, unit = '', top]) => {
    const values = looks.map((now, i) => of(now, looks[i - 1]) ?? null), last = values.at(-1);
    const shown = last === null ? '-' : (last >= 100 || Number.isInteger(last) ? Math.round(last).toLocaleString('en') : last.toPrecision(2)) + unit;
    return make('div.plot', {}, make('b', {}, shown), name, line(values, top));
  });
  const now = looks.at(-1), state = now.lmkit_engine_up ? '' : ' - the engine is down';
  $('engine').replaceChildren(
    make('p.dim', {}, `The last ${LOOKS} seconds at most${state}. Also in a terminal: lmkit top ${location.origin}`), make('div.plots', {}, ...plots),
    make('p.dim', {}, `${(now.lmkit_kv_blocks ?? 0).toLocaleString('en')} KV blocks, ${now.lmkit_preemptions_total ?? 0} preemptions since the start`));
}

async function look() {
  if ($('engine').hidden || document.hidden) return;
  try {
    looks.push(figures(await (await api('metrics')).text())); if (looks.length > LOOKS) looks.shift();
    draw();
  } catch (e) { $('engine').replaceChildren(make('div.m.error', {}, e.message)) }
}
setInterval(look, 1000);
