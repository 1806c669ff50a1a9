// Which view is shown, keys of the keyboard, and the first request.
function view(id) {
  show_only(id);
  for (const tab of $('tabs').children) tab.setAttribute('aria-selected', tab.dataset.view === id);
  if (id === 'engine') look(); else if (id === 'plugins') list_plugins(); else $('text').focus();
}
function toggle_settings() { const open = $('options').hidden; $('options').hidden = !open; $('settings').setAttribute('aria-expanded', open) }
function theme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  localStorage.setItem('theme', document.documentElement.dataset.theme = dark ? 'light' : 'dark');
}
if (localStorage.getItem('theme')) document.documentElement.dataset.theme = localStorage.getItem('theme');

async function start() {
  try {
    const model = (await (await api('v1/models')).json()).data[0];
    $('model').textContent = model.id; document.title = model.id + ' - lmkit'; $('tabs').hidden = false;
    forget(); offer(model); view('talk');
  } catch (e) { $('log').replaceChildren(); add('error', e.message) }
}
$('keys').onsubmit = e => { e.preventDefault(); sessionStorage.setItem('key', $('key').value.trim()); $('key').value = ''; start() };
$('form').onsubmit = e => { e.preventDefault(); send() };
$('options').onsubmit = e => e.preventDefault();
$('new').onclick = forget; $('settings').onclick = toggle_settings; $('theme').onclick = theme;
for (const tab of $('tabs').children) tab.onclick = () => view(tab.dataset.view);
$('text').onkeydown = e => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing) { e.preventDefault(); send() } };
onkeydown = e => {
  if (e.key === 'Escape' && running) running.abort();
  if (!e.altKey || $('tabs').hidden) return;
  const act = {1: () => view('talk'), 2: () => view('engine'), 3: () => view('plugins'), n: forget, s: toggle_settings}[e.key];
  if (act) { e.preventDefault(); act() }
};
start();
