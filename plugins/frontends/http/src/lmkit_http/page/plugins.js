// What was chosen, and why everything else was not: /debug/plan.
async function list_plugins() {
  try {
    const plan = await (await api('debug/plan')).json(), d = plan.device;
    const rows = plan.choices.map(c => make('tr', {},
      make('td', {}, c.kind.replaceAll('_', ' '), c.component ? make('div.dim', {}, c.component) : ''),
      make('td', {}, c.name, make('div.dim', {}, Object.entries(c.options).map(([k, v]) => `${k}=${JSON.stringify(v)}`).join(' '))),
      make('td', {}, c.why, c.refused.length ? refusals(c.refused) : ''),
      make('td.less.dim', {}, `${c.dist} ${c.version}`)));
    const values = plan.derived.map(v => make('tr', {}, make('td', {}, v.key), make('td', {}, shortened(v.value)), make('td.dim', {}, v.source)));
    $('plugins').replaceChildren(
      make('p.dim', {}, `${d.name || d.platform}, ${d.num_cores ?? '?'} cores, ${(d.total_memory / 2 ** 30).toFixed(0)} GiB`),
      ...plan.warnings.map(w => make('div.m.error', {}, w)),
      table(['kind', 'chosen', 'why', 'dist'], rows), make('h2', {}, 'What follows from it'), table(['value', 'is', 'because'], values));
  } catch (e) { $('plugins').replaceChildren(make('div.m.error', {}, e.message)) }
}
const shortened = value => { const text = JSON.stringify(value); return text.length > 80 ? text.slice(0, 77) + '...' : text };
const table = (heads, rows) => make('table', {}, make('tr', {}, ...heads.map(h => make(h === 'dist' ? 'th.less' : 'th', {}, h))), ...rows);
function refusals(refused) {
  const reason = r => `${r.code}: needed ${r.needed}, is ${r.offered}${r.fix ? `. ${r.fix}` : ''}`;
  return make('details', {}, make('summary.dim', {}, `not: ${refused.map(r => r.name).slice(0, 4).join(', ')}${refused.length > 4 ? ', ...' : ''}`),
    ...refused.map(r => make('div', {}, make('b', {}, r.name), ' ', make('span.dim', {}, r.reasons.map(reason).join('; ')))));
}
