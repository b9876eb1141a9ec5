'use strict';
// The launch, and what follows from its records: nothing here draws.

const launch = JSON.parse(document.getElementById('data').textContent);
launch.tensors.forEach((t, i) => {
  t.id = i;
  for (const key of ['values', 'expected', 'bounds'])
    if (t[key]) t[key] = Float64Array.from(t[key], Number);
});
launch.sites.forEach((s, i) => {
  s.id = i;
});
const grid = launch.grid;
const kPrograms = grid[0] * grid[1] * grid[2];
const kMaxElements = 1 << 22;  // of a tensor whose picture is drawn

// Record i: lane (p, r, c) is element base + p * planeStride + r * rowStride + c * columnStride.
const kRecords = launch.records.length / 4;
function record(i) {
  const [site, planes, rows, columns, planeStride, rowStride, columnStride] = launch.kinds[launch.records[4 * i]];
  return {
    site: launch.sites[site],
    planes,
    rows,
    columns,
    planeStride,
    rowStride,
    columnStride,
    program: launch.records[4 * i + 1],
    operation: launch.records[4 * i + 2],
    base: launch.records[4 * i + 3]
  };
}
function eachElement(r, visit) {
  for (let p = 0; p < r.planes; ++p) {
    for (let row = 0; row < r.rows; ++row) {
      let k = r.base + p * r.planeStride + row * r.rowStride;
      for (let c = 0; c < r.columns; ++c, k += r.columnStride) visit(k);
    }
  }
}
const lanesOf = (r) => r.planes * r.rows * r.columns;
const reads = (site) => site.access !== 'store';
const writes = (site) => site.access !== 'load';

// The records of a program are neighbours: where they begin, and how many there are.
const recordsOf = new Map();
for (let i = 0; i < kRecords; ++i) {
  const program = launch.records[4 * i + 1];
  const range = recordsOf.get(program);
  if (range)
    range.end = i + 1;
  else
    recordsOf.set(program, {begin: i, end: i + 1});
}

function programName(number) {
  const at = [number % grid[0], Math.floor(number / grid[0]) % grid[1], Math.floor(number / grid[0] / grid[1])];
  const axes = grid[2] > 1 ? 3 : grid[1] > 1 ? 2 : 1;
  return axes === 1 ? `${at[0]}` : `(${at.slice(0, axes).join(', ')})`;
}
function elementName(tensor, index) {
  if (index < 0 || index >= tensor.size || tensor.shape.length < 2) return `${tensor.name}[${index}]`;
  const at = [];
  for (let axis = tensor.shape.length, k = index; axis-- > 0; k = Math.floor(k / tensor.shape[axis])) {
    at.unshift(k % tensor.shape[axis]);
  }
  return `${tensor.name}[${at.join(', ')}]`;
}
const plural = (n, what) => `${n.toLocaleString('en')} ${what}${n === 1 ? '' : 's'}`;
const valueText = (v) => Number.isFinite(v) ? `${+ v.toPrecision(7)}` : `${v}`;

// The accesses of a program in their order, each of one or more records.
function accessesOf(program) {
  const result = [];
  const range = recordsOf.get(program);
  for (let i = range ? range.begin : 0; range && i < range.end; ++i) {
    const r = record(i);
    const last = result[result.length - 1];
    if (last && last.operation === r.operation)
      last.records.push(r);
    else
      result.push({operation: r.operation, site: r.site, records: [r]});
  }
  for (const access of result) {
    access.active = access.records.reduce((sum, r) => sum + lanesOf(r), 0);
    access.masked = Math.max(0, Math.round(access.site.lanes / access.site.calls) - access.active);
  }
  return result;
}

// The elements of a record, in numbers only: letters would be taken for the kernel's variables. "x[32 … 63]",
// "z[0 … 31, 64 … 95]", or where no ranges of indices give them "z + 100 × (0 … 31) + (96 … 127)".
function elementsText(r, tensor) {
  const range = (first, step, count) => count === 1 ?
      `${first}` :
      `${first} … ${first + step * (count - 1)}` + (Math.abs(step) === 1 ? '' : ` by ${step}`);
  const sides = [];
  for (const [count, stride] of [[r.planes, r.planeStride], [r.rows, r.rowStride], [r.columns, r.columnStride]]) {
    const last = sides[sides.length - 1];
    if (count === 1 || stride === 0) continue;
    if (last && tensor.shape.length < 2 && last.stride === stride * count)
      Object.assign(last, {count: last.count * count, stride});
    else
      sides.push({count, stride});
  }
  const at = tensor.shape.length < 2 ? [{first: r.base, step: 0, count: 1, length: Infinity, stride: 1}] : [];
  for (let axis = tensor.shape.length, stride = 1; at.length < tensor.shape.length && axis-- > 0;) {
    const length = tensor.shape[axis];
    at.unshift({first: Math.floor(r.base / stride) % length, step: 0, count: 1, length, stride});
    stride *= length;
  }
  const fits = sides.every((side) => {
    const axis = at.find((a) => a.count === 1 && a.length > 1 && side.stride % a.stride === 0);
    if (!axis) return false;
    Object.assign(axis, {count: side.count, step: side.stride / axis.stride});
    const end = axis.first + axis.step * (axis.count - 1);
    return axis.length === Infinity || (end >= 0 && end < axis.length);
  });
  if (fits && (tensor.shape.length < 2 || (r.base >= 0 && r.base < tensor.size)))
    return `${tensor.name}[${at.map((a) => range(a.first, a.step, a.count)).join(', ')}]`;
  const last = sides.pop() || {count: 1, stride: 0};
  const outer = sides.map(({count, stride}) => `${stride} × (${range(0, 1, count)})`);
  return [tensor.name, ...outer, `(${range(r.base, last.stride, last.count)})`].join(' + ');
}
const accessText = ({records}, tensor) => elementsText(records[0], tensor) + (records.length > 1 ? ', …' : '');
const shapeText = (r) => [r.planes, r.rows, r.columns].slice(r.planes > 1 ? 0 : r.rows > 1 ? 1 : 2).join(' × ');

// The elements that several programs use and one of them writes, not all of them by atomics: made when first asked for.
// -1: no program, -2: several.
function racesOf(tensor) {
  if (tensor.races) return tensor.races;
  const n = tensor.size, users = () => new Int32Array(n).fill(-1);
  const any = users(), plain = users(), atomic = users(), stored = new Uint8Array(n);
  const use = (programs, k, program) => {
    programs[k] = programs[k] === -1 || programs[k] === program ? program : -2;
  };
  for (let i = 0; i < kRecords; ++i) {
    const r = record(i);
    if (r.site.tensor !== tensor.id) continue;
    eachElement(r, (k) => {
      if (k < 0 || k >= n) return;
      use(any, k, r.program);
      use(r.site.access === 'atomic' ? atomic : plain, k, r.program);
      if (r.site.access === 'store') stored[k] = 1;
    });
  }
  return tensor.races = stored.map((is, k) => any[k] === -2 && (is || (atomic[k] !== -1 && plain[k] !== -1)) ? 1 : 0);
}

// What the whole launch did to each element of a tensor; made when first asked for.
function mapsOf(tensor) {
  if (tensor.maps || tensor.size > kMaxElements) return tensor.maps;
  const n = tensor.size;
  const maps = tensor.maps = {
    reads: new Uint32Array(n),
    writes: new Uint32Array(n),
    redundancy: new Uint32Array(n),
    first: new Uint32Array(n),
    writer: new Int32Array(n),
    reader: new Int32Array(n),         // the last record that did so, from 1
    unwritten: new Uint8Array(n),      // not written before the launch, nor since
    uninitialized: new Uint8Array(n),  // read in that state
    outside: new Map(),                // index out of bounds: lanes that used it
  };
  for (const [begin, end] of tensor.unwritten) maps.unwritten.fill(1, begin, end);
  const lastProgram = new Int32Array(n).fill(-1);
  let order = 0, lastAccess = '';
  for (let i = 0; i < kRecords; ++i) {
    const r = record(i);
    if (r.site.tensor !== tensor.id) continue;
    const access = `${r.program}/${r.operation}`;
    if (access !== lastAccess) ++order;
    lastAccess = access;
    const reading = reads(r.site), writing = writes(r.site);
    eachElement(r, (k) => {
      if (k < 0 || k >= n) {
        maps.outside.set(k, (maps.outside.get(k) || 0) + 1);
        return;
      }
      if (lastProgram[k] !== r.program) ++maps.redundancy[k];
      lastProgram[k] = r.program;
      if (maps.first[k] === 0) maps.first[k] = order;
      if (reading) {
        ++maps.reads[k];
        maps.reader[k] = i + 1;
        if (maps.unwritten[k]) maps.uninitialized[k] = 1;
      }
      if (writing) {
        ++maps.writes[k];
        maps.writer[k] = i + 1;
        maps.unwritten[k] = 0;
      }
    });
  }
  if (launch.left_out > 0) {  // what is not in the sample may have been written
    maps.unwritten.fill(0);
    maps.uninitialized.fill(0);
  }
  return maps;
}

// Is the value within its tolerance? By the rule that the verdict uses.
function isWrong(tensor, k) {
  const value = tensor.values[k], expected = tensor.expected[k];
  if (mapsOf(tensor).unwritten[k]) return true;
  if (value === expected || (Number.isNaN(value) && Number.isNaN(expected))) return false;
  const allowed = tensor.bounds ? tensor.bounds[k] : tensor.absolute + tensor.relative * Math.abs(expected);
  return !(Math.abs(value - expected) <= allowed);
}

// ---- The totals again, from the records alone ----

function recount() {
  const lanes = new Float64Array(launch.sites.length), sectors = new Float64Array(launch.sites.length);
  const outside = new Float64Array(launch.sites.length);
  const seen = launch.tensors.map((t) => ({
                                    read: new Uint8Array(t.size),
                                    written: new Uint8Array(t.size),
                                    sector: new Uint32Array(Math.ceil(t.size * t.bytes / 32))
                                  }));
  let access = 0, last = '';
  for (let i = 0; i < kRecords; ++i) {
    const r = record(i), tensor = launch.tensors[r.site.tensor], mine = seen[tensor.id], s = r.site.id;
    const name = `${r.program}/${r.operation}`;
    if (name !== last) ++access;
    last = name;
    const reading = reads(r.site), writing = writes(r.site);
    eachElement(r, (k) => {
      ++lanes[s];
      if (k < 0 || k >= tensor.size) {
        ++outside[s];
        return;
      }
      if (reading) mine.read[k] = 1;
      if (writing) mine.written[k] = 1;
      const sector = Math.floor(k * tensor.bytes / 32);
      if (mine.sector[sector] !== access) ++sectors[s];
      mine.sector[sector] = access;
    });
  }
  const rows = [];
  const compare = (what, counted, here) => rows.push({what, counted, here, agrees: counted === here});
  for (const site of launch.sites) {
    const where = `line ${site.line}:${site.column}, ${site.access} ${launch.tensors[site.tensor].name}`;
    compare(`${where}: lanes`, site.active, lanes[site.id]);
    compare(`${where}: bytes`, site.bytes, lanes[site.id] * launch.tensors[site.tensor].bytes);
    compare(`${where}: sectors`, site.sectors, sectors[site.id]);
    const found = launch.findings.find((f) => f.site === site.id && f.problem === 'out of bounds');
    compare(`${where}: out of bounds`, found ? found.count : 0, outside[site.id]);
  }
  for (const tensor of launch.tensors) {
    const count = (bits) => bits.reduce((sum, bit) => sum + bit, 0);
    compare(`${tensor.name}: elements read`, tensor.read, count(seen[tensor.id].read));
    compare(`${tensor.name}: elements written`, tensor.written, count(seen[tensor.id].written));
    const races = launch.findings.filter((f) => f.problem === 'race' && launch.sites[f.site].tensor === tensor.id);
    compare(`${tensor.name}: elements in a race`, races.reduce((sum, f) => sum + f.count, 0), count(racesOf(tensor)));
  }
  return rows;
}
