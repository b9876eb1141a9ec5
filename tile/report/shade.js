// What the colours of a picture mean.

const kModes = [
  ['footprint', 'footprint'],
  ['reads', 'reads'],
  ['writes', 'writes'],
  ['redundancy', 'redundancy'],
  ['first', 'first touch'],
  ['values', 'values'],
  ['difference', 'difference'],
];
const kMeaning = {
  footprint: 'what the selected programs load and store',
  reads: 'how often each element is read',
  writes: 'how often each element is written',
  redundancy: 'how many programs use each element',
  first: 'the order in which elements are first used',
  values: 'the values after the launch',
  difference: '|value − expected|',
};

let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name
           of ['cell', 'ink', 'soft', 'rule', 'card', 'load', 'store', 'both', 'bad', 'race', 'wrong', 'many', 'low',
               'high']) {
    const value = style.getPropertyValue(`--${name}`).trim();
    colours[name] = [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
  }
}
const shortText = (v) => `${+ v.toPrecision(4)}`;
const css = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;
const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
const kOrder = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function ramp(stops, t) {
  const x = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(x), stops.length - 2);
  return mix(stops[i], stops[i + 1], x - i);
}

// A cell's colour and its rank among those that share a cell of the picture.
function shaderOf(picture, maps, mode) {
  const t = picture.tensor, empty = colours.cell;
  const blank = {fill: css(empty), rank: -1};
  const scaled = (data, colour) => {
    let max = 1;
    for (let k = 0; k < t.size; ++k) max = Math.max(max, data[k]);
    picture.scale = `0 to ${max.toLocaleString('en')}`;
    const fills = new Map();
    return (k) => {
      const v = data[k];
      if (v === 0) return blank;
      if (!fills.has(v)) fills.set(v, {fill: css(colour(max === 1 ? 1 : (v - 1) / (max - 1))), rank: v});
      return fills.get(v);
    };
  };
  const tint = (colour) => (x) => mix(empty, colour, 0.3 + 0.7 * x);
  picture.missing = '';
  picture.scale = '';
  if (mode === 'reads') return scaled(maps.reads, tint(colours.load));
  if (mode === 'writes') return scaled(maps.writes, tint(colours.store));
  if (mode === 'redundancy') return scaled(maps.redundancy, tint(colours.many));
  if (mode === 'first') {
    const shade = scaled(maps.first, (x) => ramp(kOrder, x));
    picture.scale = 'early dark, late bright';
    return shade;
  }
  if (mode === 'values' && t.values) return valueShader(picture, maps, empty, blank);
  if (mode === 'difference' && t.expected && t.values) {
    let max = 0, wrong = 0;
    for (let k = 0; k < t.size; ++k) {
      if (!isWrong(t, k)) continue;
      ++wrong;
      if (!maps.unwritten[k]) max = Math.max(max, Math.abs(t.values[k] - t.expected[k]) || 0);
    }
    picture.scale = max ? `wrong by up to ${shortText(max)}` : wrong ? `${wrong} wrong` : 'none above the tolerance';
    const right = {fill: css(mix(empty, colours.load, 0.16)), rank: 0};
    return (k) => {
      if (!isWrong(t, k)) return right;
      const x = Math.abs(t.values[k] - t.expected[k]) / (max || 1);
      const share = maps.unwritten[k] ? 0 : Number.isFinite(x) ? x : 1;
      return {fill: css(mix(empty, colours.wrong, 0.45 + 0.55 * share)), rank: 1 + share};
    };
  }
  if (mode !== 'footprint')
    picture.missing = mode === 'values' ? 'no values here: the footprint' : 'nothing to compare with: the footprint';
  const fill = [empty, colours.load, colours.store, colours.both];
  const strong = fill.map((colour, i) => ({fill: css(colour), rank: i + 4}));
  const pale = fill.map((colour, i) => ({fill: css(mix(empty, colour, 0.35)), rank: i}));
  return (k) => {
    const bits = picture.state.marked(t, k);
    return bits === 0 ? blank : bits & 4 ? pale[bits & 3] : strong[bits & 3];
  };
}

function valueShader(picture, maps, empty, blank) {
  const t = picture.tensor;
  let low = Infinity, high = -Infinity;
  for (let k = 0; k < t.size; ++k) {
    if (maps.unwritten[k] || !Number.isFinite(t.values[k])) continue;
    low = Math.min(low, t.values[k]);
    high = Math.max(high, t.values[k]);
  }
  if (low > high) return () => blank;
  picture.scale = `${shortText(low)} to ${shortText(high)}`;
  const signed = low < 0 && high > 0, max = Math.max(-low, high);
  return (k) => {
    const v = t.values[k];
    if (maps.unwritten[k]) return blank;
    if (!Number.isFinite(v)) return {fill: css(colours.wrong), rank: Infinity};
    const x = signed ? v / max : high > low ? (v - low) / (high - low) : 1;
    const end = signed && x < 0 ? colours.low : colours.high;
    return {fill: css(mix(empty, end, signed ? Math.abs(x) : 0.15 + 0.85 * x)), rank: Math.abs(x)};
  };
}

// Uninitialized reads (2) or elements that were never written (1).
function hatch(g, [x, y, w, h], kind) {
  g.save();
  g.beginPath();
  g.rect(x, y, w, h);
  g.clip();
  g.strokeStyle = css(kind === 2 ? colours.bad : colours.soft);
  g.lineWidth = kind === 2 ? 1.6 : 1.1;
  g.beginPath();
  for (let d = Math.floor((x + y) / 6) * 6; d <= x + y + w + h; d += 6) {
    g.moveTo(d - y, y);
    g.lineTo(d - y - h, y + h);
  }
  g.stroke();
  g.restore();
}
