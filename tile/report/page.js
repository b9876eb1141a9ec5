// The page: programs, pictures, accesses, source lines and wrong values, which follow one selection.

function element(tag, parent, properties) {
  const e = Object.assign(document.createElement(tag), properties);
  if (parent) parent.append(e);
  return e;
}
const byId = (id) => document.getElementById(id);
// A row of a table that can be chosen, by mouse or keyboard.
function selectable(row, select) {
  row.tabIndex = 0;
  row.addEventListener('click', select);
  row.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' && event.key !== ' ') return;
    event.preventDefault();
    select();
  });
}

// What is wrong comes first: an unsafe access, else a wrong value, with the program that did it.
const firstWrong = launch.findings.length ? null : launch.wrong[0];
const selection = {
  program: launch.findings.length ? launch.findings[0].program :
      firstWrong                  ? Math.max(firstWrong.program, 0) :
                                    0,
  operation: -1,
  line: null,
  mode: firstWrong && launch.tensors[firstWrong.tensor].values ? 'difference' : 'footprint',
  colour: 'bytes',
  ring: null
};
let pictures = [];

// ---- What is selected ----

const bitsOf = (site) => (reads(site) ? 1 : 0) | (writes(site) ? 2 : 0);

// What all programs do together to the elements of a tensor, or those of its accesses that `wanted` lets through.
function together(tensor, wanted) {
  const bits = new Uint8Array(tensor.size);
  for (let i = 0; i < kRecords; ++i) {
    const r = record(i);
    if (r.site.tensor === tensor.id && wanted(r))
      eachElement(r, (k) => {
        if (k in bits) bits[k] |= bitsOf(r.site);
      });
  }
  return bits;
}
const everything = launch.tensors.map(() => null);

// Bits 1 load, 2 store; 4 where that is not what is selected, but what other programs, accesses or lines do.
function footprint() {
  const onLine = (r) =>
      selection.line === null || (r.site.line === selection.line.line && r.site.file === selection.line.file);
  const focus = {tensor: -1, elements: new Set()};
  let own;
  if (selection.program < 0) {
    own = launch.tensors.map((t) => {
      if (t.size > kMaxElements) return null;
      const bits = together(t, onLine), outside = mapsOf(t).outside;
      return {get: (k) => (k in bits ? bits[k] : outside.has(k) ? 1 : 0)};
    });
  } else {
    own = launch.tensors.map(() => new Map());
    const range = recordsOf.get(selection.program) || {begin: 0, end: 0};
    for (let i = range.begin; i < range.end; ++i) {
      const r = record(i);
      if (selection.operation >= 0 ? r.operation !== selection.operation : !onLine(r)) continue;
      const mine = own[r.site.tensor], bits = bitsOf(r.site);
      if (selection.operation >= 0) focus.tensor = r.site.tensor;
      eachElement(r, (k) => {
        mine.set(k, (mine.get(k) || 0) | bits);
        if (selection.operation >= 0) focus.elements.add(k);
      });
    }
  }
  const marked = (tensor, k) => {
    const bits = own[tensor.id].get(k);
    if (bits) return bits;
    const all = everything[tensor.id] || (everything[tensor.id] = together(tensor, () => true));
    return all[k] ? all[k] | 4 : 0;
  };
  return {marked, focus: focus.tensor >= 0 ? focus : null};
}

let waiting = 0;
function changed() {
  if (!waiting)
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      showAll();
    });
}
function showAll() {
  const state = {...footprint(), mode: selection.mode, ring: selection.ring};
  for (const picture of pictures) picture.draw(state);
  programGrid.show();
  showOperations();
  for (const row of document.querySelectorAll('table.source tr.accessed')) {
    const here = selection.line && Number(row.dataset.line) === selection.line.line &&
        Number(row.dataset.file) === selection.line.file;
    row.classList.toggle('selected', Boolean(here));
    row.setAttribute('aria-current', Boolean(here));
  }
}
function choose(what) {
  if ('program' in what && what.program !== selection.program && !('operation' in what)) selection.operation = -1;
  Object.assign(selection, what);
  changed();
}

// ---- Modes ----

function buildModes() {
  const box = element('fieldset', byId('modes'));
  element('legend', box, {className: 'unseen', textContent: 'What the pictures show'});
  const meaning = element('p', byId('modes'), {className: 'soft'});
  const key = element('p', byId('modes'), {className: 'key soft'});
  key.innerHTML = '<span class="load">load</span> <span class="store">store</span> <span class="both">both</span> ' +
      '<span class="pale">pale: what the rest does</span> <span class="race">race</span> ' +
      '<span class="bad">out of bounds</span> ' +
      '<span class="never">never written</span>';
  const show = () => {
    meaning.textContent = kMeaning[selection.mode];
    key.hidden = selection.mode !== 'footprint';
  };
  for (const [value, text] of kModes) {
    if (value === 'difference' && !launch.tensors.some((t) => t.expected)) continue;
    if (value === 'values' && !launch.tensors.some((t) => t.values)) continue;
    const label = element('label', box);
    const input = element('input', label, {type: 'radio', name: 'mode', value, checked: value === selection.mode});
    element('span', label, {textContent: text});
    input.addEventListener('change', () => {
      choose({mode: value});
      show();
    });
  }
  show();
}
function setMode(mode) {
  const input = document.querySelector(`#modes input[value=${mode}]`);
  if (input) input.click();
}

// ---- The accesses of the selected program ----

const kMaxOperations = 500;
let operationsShown = null;
function showOperations() {
  const box = byId('operations');
  if (operationsShown !== selection.program) {
    operationsShown = selection.program;
    box.replaceChildren();
    element('h3', box, {
      textContent: selection.program < 0 ? 'Accesses of a program' :
                                           `Accesses of program ${programName(selection.program)}`
    });
    if (selection.program < 0) {
      element('p', box, {className: 'soft', textContent: 'Select a program to see what it accesses, in order.'});
      return;
    }
    const accesses = accessesOf(selection.program);
    if (accesses.length === 0) {
      element(
          'p', box,
          {className: 'soft', textContent: launch.left_out > 0 ? 'Not in the sample.' : 'It accesses nothing.'});
      return;
    }
    const list = element('ol', box, {className: 'operations', tabIndex: 0});
    list.setAttribute('role', 'listbox');
    list.setAttribute('aria-label', 'Accesses in order: arrow keys choose one, Escape none');
    const iterations = new Map();
    accesses.forEach((access, i) => {
      const iteration = iterations.get(access.site.id) || 0;
      iterations.set(access.site.id, iteration + 1);
      if (i < kMaxOperations) operationItem(list, access, iteration);
    });
    if (accesses.length > kMaxOperations) {
      element('p', box, {className: 'soft', textContent: `And ${accesses.length - kMaxOperations} more.`});
    }
    list.addEventListener('keydown', (event) => {
      const items = [...list.children],
            now = items.findIndex((e) => Number(e.dataset.operation) === selection.operation);
      const next = {ArrowDown: now + 1, ArrowUp: now < 0 ? 0 : now - 1, Home: 0, End: items.length - 1}[event.key];
      if (event.key === 'Escape')
        choose({operation: -1});
      else if (next === undefined)
        return;
      else if (items[next])
        choose({operation: Number(items[next].dataset.operation)});
      event.preventDefault();
    });
  }
  for (const item of box.querySelectorAll('li')) {
    const here = Number(item.dataset.operation) === selection.operation;
    item.setAttribute('aria-selected', here);
    if (here) {
      const list = item.parentNode;
      list.setAttribute('aria-activedescendant', item.id);
      if (item.offsetTop < list.scrollTop || item.offsetTop + item.offsetHeight > list.scrollTop + list.clientHeight) {
        list.scrollTop = item.offsetTop - list.clientHeight / 2;
      }
    }
  }
}
function operationItem(list, access, iteration) {
  const tensor = launch.tensors[access.site.tensor], r = access.records[0];
  const item = element('li', list, {id: `operation-${access.operation}`});
  item.dataset.operation = access.operation;
  item.setAttribute('role', 'option');
  element('span', item, {className: 'line', textContent: access.site.line});
  element('span', item, {className: access.site.access, textContent: access.site.access});
  element('code', item, {textContent: accessText(access, tensor)});
  const races = racesOf(tensor), racing = new Set();
  for (const each of access.records) eachElement(each, (k) => races[k] && racing.add(k));
  if (racing.size) element('span', item, {className: 'race', textContent: `${racing.size} in a race`});
  const notes = [access.records.length > 1 ? `${access.records.length} parts` : shapeText(r)];
  if (access.masked) notes.push(`${access.masked} masked`);
  if (access.site.calls > kPrograms) notes.unshift(`step ${iteration}`);
  element('span', item, {className: 'soft', textContent: notes.join(' · ')});
  item.addEventListener(
      'click', () => choose({operation: access.operation === selection.operation ? -1 : access.operation}));
}

// ---- Source lines and problems ----

function linkSource() {
  for (const row of document.querySelectorAll('table.source tr.accessed')) {
    selectable(row, () => {
      const line = {file: Number(row.dataset.file), line: Number(row.dataset.line)};
      const same = selection.line && selection.line.line === line.line && selection.line.file === line.file;
      choose({line: same ? null : line, operation: -1});
    });
  }
  for (const card of document.querySelectorAll('.problem')) {
    const finding = launch.findings[Number(card.dataset.finding)], site = launch.sites[finding.site];
    const button = element(
        'button', card,
        {type: 'button', className: 'show', textContent: `show program ${programName(finding.program)}`});
    button.addEventListener('click', () => {
      setMode('footprint');
      const inside = finding.index >= 0 && finding.index < launch.tensors[site.tensor].size;
      choose({
        program: finding.program,
        operation: -1,
        line: {file: site.file, line: site.line},
        ring: inside ? {tensor: site.tensor, index: finding.index} : null
      });
      showPlaneOf(site.tensor, finding.index);
      byId('explore').scrollIntoView({block: 'start'});
    });
  }
}
function showPlaneOf(tensor, index) {
  const picture = pictures[tensor];
  if (!picture || !picture.showPlane) return;
  const plane = Math.floor(index / (picture.rows * picture.columns));
  picture.showPlane(Math.min(Math.max(plane, 0), picture.planes - 1));
  picture.fit();
}

// ---- Who wrote a wrong value ----

function linkWrong() {
  for (const row of document.querySelectorAll('table.wrong tr[data-wrong]')) {
    const wrong = launch.wrong[Number(row.dataset.wrong)];
    selectable(row, () => {
      for (const other of document.querySelectorAll('table.wrong tr.selected')) other.classList.remove('selected');
      row.classList.add('selected');
      explain(wrong);
    });
  }
}
function explain(wrong) {
  const box = byId('explorer'), tensor = launch.tensors[wrong.tensor], name = elementName(tensor, wrong.index);
  box.replaceChildren();
  choose({ring: wrong, program: wrong.program, operation: wrong.operation, line: null});
  showPlaneOf(wrong.tensor, wrong.index);
  if (wrong.program < 0) {
    element('p', box, {
      textContent:
          `No record of this launch stores to ${name}. The element has a ring in the picture of ${tensor.name}.`
    });
    return;
  }
  const before = accessesOf(wrong.program).filter((a) => a.operation < wrong.operation && reads(a.site));
  element('p', box, {
    textContent: `${name} was stored last by program ${programName(wrong.program)} at line ` +
        `${launch.sites[wrong.site].line}. ` +
        (before.length ? 'What it had loaded until then:' : 'It had loaded nothing before.')
  });
  const list = element('div', box, {className: 'fed'});
  for (const access of before.slice(-12)) {
    const t = launch.tensors[access.site.tensor];
    const button = element('button', list, {type: 'button'});
    button.textContent = `line ${access.site.line}: ${accessText(access, t)}, ${shapeText(access.records[0])}`;
    button.addEventListener('click', () => {
      setMode('footprint');
      choose({program: wrong.program, operation: access.operation, line: null});
      byId('explore').scrollIntoView({block: 'start'});
    });
  }
  if (before.length > 12)
    element('p', box, {className: 'soft', textContent: `And ${before.length - 12} earlier ones.`});
  const show = element('button', box, {type: 'button', className: 'show', textContent: 'show it in the pictures'});
  show.addEventListener('click', () => byId('explore').scrollIntoView({block: 'start'}));
}

// ---- The totals again ----

function showRecount() {
  const box = byId('recount'), rows = recount(), differ = rows.filter((row) => !row.agrees).length;
  const sampled = launch.left_out > 0;
  box.dataset.agrees = sampled ? 'sampled' : differ === 0 ? 'yes' : 'no';
  box.dataset.totals = rows.length;
  element('h2', box, {textContent: 'Recount'});
  element('p', box, {
    className: sampled || differ === 0 ? 'soft' : 'bad',
    textContent: `This page added up ${plural(kRecords, 'record')} once more: ` +
        (sampled          ? 'a sample, so that its totals are below those of the launch.' :
             differ === 0 ? `all ${rows.length} totals agree with the launch.` :
                            `${differ} of ${rows.length} totals differ from the launch.`)
  });
  const details = element('details', box);
  element('summary', details, {textContent: 'The totals'});
  const table = element('table', element('div', details, {className: 'scroll', tabIndex: 0}));
  const head = element('tr', element('thead', table));
  for (const text of ['total', 'launch', 'page', '']) element('th', head, {textContent: text, scope: 'col'});
  const body = element('tbody', table);
  for (const row of rows) {
    const line = element('tr', body, {className: row.agrees || sampled ? '' : 'bad'});
    element('th', line, {textContent: row.what, scope: 'row'});
    element('td', line, {textContent: row.counted.toLocaleString('en')});
    element('td', line, {textContent: row.here.toLocaleString('en')});
    element('td', line, {textContent: row.agrees ? '✓' : sampled ? '' : '✕'});
  }
}

function fitPictures() {
  for (const picture of pictures)
    if (picture.canvas) picture.fit();
}

document.documentElement.classList.add('with-scripts');
readColours();
programGrid.build();
buildModes();
pictures = launch.tensors.map((t) => new Picture(t, byId('pictures'), (program) => choose({program})));
fitPictures();
for (const {site, records} of accessesOf(selection.program).reverse()) {
  if (!pictures[site.tensor].hasProblems) showPlaneOf(site.tensor, records[0].base);
}
linkSource();
linkWrong();
showRecount();
showAll();

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  readColours();
  changed();
});
let width = innerWidth;
addEventListener('resize', () => {
  if (innerWidth === width) return;
  width = innerWidth;
  fitPictures();
  changed();
});
