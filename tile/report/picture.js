// A tensor as a picture: a window of its elements, at most 512 x 512 cells. A cell of several elements shows the
// largest of them, so that a single bad one stays visible. Out-of-bounds elements are drawn in a margin.

const kMaxCells = 512, kMaxMargin = 8;

class Picture {
  constructor(tensor, parent, chooseProgram) {
    this.tensor = tensor;
    const shape = tensor.shape;
    this.columns = shape.length ? shape[shape.length - 1] : 1;
    this.rows = shape.length > 1 ? shape[shape.length - 2] : 1;
    this.planes = this.rows * this.columns ? tensor.size / (this.rows * this.columns) : 0;
    this.plane = 0;
    this.cursor = null;
    this.build(parent, chooseProgram);
  }

  build(parent, chooseProgram) {
    const t = this.tensor;
    const figure = element('figure', parent, {className: 'picture'});
    figure.dataset.tensor = t.name;
    figure.classList.toggle('wide', this.rows * 4 < this.columns);
    const head = element('div', figure, {className: 'head'});
    element('h3', head, {innerHTML: '<code></code>'}).firstChild.textContent = t.name;
    element('span', head, {className: 'soft', textContent: `${t.dtype} ${t.shape.join(' × ')}`});
    if (t.size === 0 || t.size > kMaxElements) {
      element('p', figure, {
        className: 'soft',
        textContent: t.size ? 'More than 4 million elements: no picture.' : 'It has no elements.'
      });
      return;
    }
    const tools = element('div', head, {className: 'tools'});
    const tool = (text, label, act) => {
      const button = element('button', tools, {textContent: text, title: label, type: 'button'});
      button.setAttribute('aria-label', `${label}, ${t.name}`);
      button.addEventListener('click', act);
    };
    tool('−', 'zoom out', () => this.zoom(2));
    tool('+', 'zoom in', () => this.zoom(0.5));
    tool('⤢', 'show all', () => this.showAll());
    this.legend = element('p', figure, {className: 'legend soft'});
    if (this.planes > 1) this.buildSlicers(figure);
    this.canvas = element('canvas', figure, {tabIndex: 0});
    this.canvas.setAttribute('role', 'application');
    this.canvas.setAttribute(
        'aria-label',
        `${t.name}: arrow keys choose an element, plus and minus zoom, Enter selects ` +
            'the program that used it last');
    this.readout = element('figcaption', figure, {className: 'readout'});
    this.readout.setAttribute('aria-live', 'polite');
    this.listen(chooseProgram);
  }

  buildSlicers(figure) {
    const sides = this.tensor.shape.slice(0, -2);
    const box = element('div', figure, {className: 'slicers'});
    const inputs = sides.map((side, axis) => {
      const label = element('label', box, {textContent: `axis ${axis} `});
      const input = element('input', label, {type: 'range', min: 0, max: side - 1, value: 0});
      const shown = element('output', label, {textContent: `0 of ${side}`});
      input.addEventListener('input', () => {
        shown.textContent = `${input.value} of ${side}`;
        this.plane = inputs.reduce((plane, i, a) => plane * sides[a] + Number(i.value), 0);
        this.cursor = null;
        this.showAll();
      });
      return input;
    });
    this.showPlane = (plane) => {
      for (let axis = sides.length, k = plane; axis-- > 0; k = Math.floor(k / sides[axis])) {
        inputs[axis].value = k % sides[axis];
        inputs[axis].nextSibling.textContent = `${k % sides[axis]} of ${sides[axis]}`;
      }
      this.plane = plane;
    };
    const planes = this.planesWithProblems();
    this.hasProblems = planes.length > 0;
    if (!this.hasProblems) return;
    this.showPlane(planes[0]);
    element(
        'span', box,
        {className: 'bad', textContent: `${planes.length} of ${plural(this.planes, 'slice')} with problems`});
    const next = element('button', box, {type: 'button', textContent: 'next problem'});
    next.setAttribute('aria-label', `next slice with a problem, ${this.tensor.name}`);
    next.addEventListener('click', () => {
      this.showPlane(planes.find((plane) => plane > this.plane) ?? planes[0]);
      this.cursor = null;
      this.showAll();
    });
  }

  planesWithProblems() {
    const t = this.tensor, maps = mapsOf(t), races = racesOf(t), size = this.rows * this.columns, planes = new Set();
    for (let k = 0; k < t.size; ++k)
      if (races[k] || maps.uninitialized[k] || (t.values && t.expected && isWrong(t, k)))
        planes.add(Math.floor(k / size));
    for (const k of maps.outside.keys()) planes.add(k < 0 ? 0 : this.planes - 1);
    return [...planes].sort((a, b) => a - b);
  }

  // The element at a place of the picture; those out of bounds continue the first or the last row.
  index(x, y) {
    if (this.rows > 1 && (x < 0 || x >= this.columns)) return null;
    if (this.rows === 1 && y !== 0) return null;
    return (this.plane * this.rows + y) * this.columns + x;
  }
  place(index) {
    if (this.rows === 1 && this.planes === 1) return {x: index, y: 0};
    const row = Math.floor(index / this.columns);
    return {x: index - row * this.columns, y: row - this.plane * this.rows};
  }

  // How far the lanes out of bounds reach, in rows (or in elements of a single row).
  margins() {
    const outside = mapsOf(this.tensor).outside;
    let before = 0, after = 0, far = 0;
    const flat = this.rows === 1 && this.planes === 1;
    const unit = flat ? 1 : this.columns,
          limit = flat ? Math.max(kMaxMargin, Math.ceil(this.columns / 3)) : kMaxMargin;
    for (const [k, lanes] of outside) {
      const distance = k < 0 ? Math.ceil(-k / unit) : Math.floor((k - this.tensor.size) / unit) + 1;
      if (distance > limit) far += lanes;
      if (k < 0)
        before = Math.max(before, Math.min(distance, limit));
      else
        after = Math.max(after, Math.min(distance, limit));
    }
    if (this.plane > 0) before = 0;
    if (this.plane < this.planes - 1) after = 0;
    return {before, after, far, flat};
  }

  fit() {
    const m = this.margins();
    this.all = m.flat || this.rows === 1 ? {
      x: m.flat ? -m.before : 0,
      y: m.flat ? 0 : -m.before,
      w: this.columns + (m.flat ? m.before + m.after : 0),
      h: m.flat ? 1 : 1 + m.before + m.after
    } :
                                           {x: 0, y: -m.before, w: this.columns, h: this.rows + m.before + m.after};
    this.far = m.far;
    this.view = {...this.all};
    const room = Math.max(this.canvas.parentNode.clientWidth - 2, 120);
    const {w, h} = this.all;
    const side = Math.min(room / w, 340 / h, 26);
    this.width = Math.round(Math.min(w * Math.max(side, Math.min(24, 160 / w)), room));
    this.height = Math.round(h * Math.max(side, Math.min(h === 1 ? 34 : 24, 150 / h)));
  }

  showAll() {
    this.fit();
    this.draw();
  }

  zoom(factor, centre) {
    const v = this.view, a = this.all;
    const c = centre || this.cursor || {x: v.x + v.w / 2, y: v.y + v.h / 2};
    const w = Math.min(a.w, Math.max(Math.min(8, a.w), Math.round(v.w * factor)));
    const h = Math.min(a.h, Math.max(Math.min(4, a.h), Math.round(v.h * factor)));
    const clamp = (low, value, high) => Math.min(Math.max(low, Math.round(value)), high);
    this.view = {
      x: clamp(a.x, c.x - (c.x - v.x) / v.w * w, a.x + a.w - w),
      y: clamp(a.y, c.y - (c.y - v.y) / v.h * h, a.y + a.h - h),
      w,
      h
    };
    this.draw();
  }

  listen(chooseProgram) {
    const c = this.canvas;
    const under = (event) => {
      const box = c.getBoundingClientRect(), v = this.view;
      return {
        x: v.x + Math.floor((event.clientX - box.left) / box.width * v.w),
        y: v.y + Math.floor((event.clientY - box.top) / box.height * v.h)
      };
    };
    const show = (at) => {
      this.cursor = at;
      this.draw();
    };
    c.addEventListener('mousemove', (event) => {
      if (event.buttons & 1 && this.drag) {
        const v = this.view, a = this.all, box = c.getBoundingClientRect();
        v.x = Math.min(
            Math.max(a.x, Math.round(this.drag.x - (event.clientX - this.drag.px) / box.width * v.w)), a.x + a.w - v.w);
        v.y = Math.min(
            Math.max(a.y, Math.round(this.drag.y - (event.clientY - this.drag.py) / box.height * v.h)),
            a.y + a.h - v.h);
      }
      show(under(event));
    });
    c.addEventListener('mousedown', (event) => {
      this.drag = {x: this.view.x, y: this.view.y, px: event.clientX, py: event.clientY};
    });
    c.addEventListener('click', (event) => {
      if (Math.abs(event.clientX - this.drag.px) + Math.abs(event.clientY - this.drag.py) > 4) return;
      const at = under(event);
      this.choose(this.index(at.x, at.y), chooseProgram);
    });
    c.addEventListener('mouseleave', () => show(null));
    c.addEventListener('wheel', (event) => {
      if (!event.ctrlKey && document.activeElement !== c) return;  // a page that is scrolled must not zoom
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, under(event));
    }, {passive: false});
    c.addEventListener('blur', () => show(null));
    c.addEventListener('keydown', (event) => {
      const v = this.view, a = this.all, step = event.shiftKey ? 10 : 1;
      const moves = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]};
      const at = this.cursor || {x: Math.max(v.x, 0), y: Math.max(v.y, 0)};
      if (moves[event.key]) {
        const [dx, dy] = this.cursor ? moves[event.key] : [0, 0];
        at.x = Math.min(Math.max(a.x, at.x + dx), a.x + a.w - 1);
        at.y = Math.min(Math.max(a.y, at.y + dy), a.y + a.h - 1);
        v.x = Math.min(Math.max(v.x, at.x - v.w + 1), at.x);
        v.y = Math.min(Math.max(v.y, at.y - v.h + 1), at.y);
        show(at);
      } else if (event.key === '+' || event.key === '=') {
        this.zoom(0.5);
      } else if (event.key === '-') {
        this.zoom(2);
      } else if (event.key === '0') {
        this.showAll();
      } else if (event.key === 'Enter' && this.cursor) {
        this.choose(this.index(at.x, at.y), chooseProgram);
      } else {
        return;
      }
      event.preventDefault();
    });
  }

  choose(k, chooseProgram) {
    const maps = mapsOf(this.tensor);
    if (k === null) return;
    if (k >= 0 && k < this.tensor.size) {
      const i = maps.writer[k] || maps.reader[k];
      if (i) chooseProgram(record(i - 1).program);
      return;
    }
    for (let i = 0; i < kRecords; ++i) {  // out of bounds: the first that went there
      const r = record(i);
      let here = false;
      if (r.site.tensor === this.tensor.id)
        eachElement(r, (e) => {
          here = here || e === k;
        });
      if (here) return chooseProgram(r.program);
    }
  }

  // Draws the state: {mode, marked(tensor, k), focus, ring}. What does not follow the cursor is kept.
  draw(state) {
    if (!this.canvas) return;
    if (state) this.state = state;
    const c = this.canvas, g = c.getContext('2d'), dpr = window.devicePixelRatio || 1;
    const now = JSON.stringify([this.view, this.plane, this.width, this.height, dpr]);
    if (state || now !== this.drawn) this.drawCells(dpr);
    this.drawn = now;
    c.style.width = `${this.width}px`;
    c.style.height = `${this.height}px`;
    c.width = this.cells.width;
    c.height = this.cells.height;
    g.drawImage(this.cells, 0, 0);
    g.scale(dpr, dpr);
    if (this.cursor) this.mark(g, this.cursor, colours.ink, 2);
    this.describe();
  }

  drawCells(dpr) {
    const {view, tensor} = this, maps = mapsOf(tensor), races = racesOf(tensor),
                 shade = shaderOf(this, maps, this.state.mode);
    this.cells = Object.assign(
        document.createElement('canvas'), {width: Math.round(this.width * dpr), height: Math.round(this.height * dpr)});
    const g = this.cells.getContext('2d');
    g.scale(dpr, dpr);
    const poolX = Math.ceil(view.w / kMaxCells), poolY = Math.ceil(view.h / kMaxCells);
    const cw = this.width / view.w * poolX, ch = this.height / view.h * poolY;
    const gap = Math.min(cw, ch) >= 7 ? 1 : 0;
    const hatched = [], racing = [], outside = [];
    for (let y = view.y, py = 0; y < view.y + view.h; y += poolY, ++py) {
      for (let x = view.x, px = 0; x < view.x + view.w; x += poolX, ++px) {
        let best = null, untold = 0, race = 0, out = 0;
        for (let yy = y; yy < Math.min(y + poolY, view.y + view.h); ++yy) {
          for (let xx = x; xx < Math.min(x + poolX, view.x + view.w); ++xx) {
            const k = this.index(xx, yy);
            if (k === null) continue;
            if (k < 0 || k >= tensor.size) {
              out = Math.max(
                  out,
                  !maps.outside.has(k)                                                ? 0 :
                      this.state.mode !== 'footprint' || this.state.marked(tensor, k) ? 2 :
                                                                                        1);
              continue;
            }
            untold = Math.max(untold, maps.uninitialized[k] ? 2 : maps.unwritten[k] ? 1 : 0);
            race |= races[k];
            const cell = shade(k);
            if (best === null || cell.rank > best.rank) best = cell;
          }
        }
        const left = Math.round(px * cw), top = Math.round(py * ch);  // whole pixels: no seams
        const rect = [left, top, Math.round((px + 1) * cw) - left - gap, Math.round((py + 1) * ch) - top - gap];
        if (out) {
          outside.push([rect, out]);
        } else if (best) {
          g.fillStyle = best.fill;
          g.fillRect(...rect);
          if (untold) hatched.push([rect, untold]);
          if (race) racing.push(rect);
        }
      }
    }
    this.drawMargin(g, outside);
    for (const [rect, kind] of hatched) hatch(g, rect, kind);
    g.fillStyle = css(colours.race);
    for (const [x, y, w, h] of racing) g.fillRect(x, y + Math.floor(h * 0.6), w, h - Math.floor(h * 0.6));
    this.outline(g);
    this.gap = gap;
    this.drawFocus(g);
    this.showLegend(poolX, poolY);
    this.text = this.summary(maps);
  }

  drawMargin(g, cells) {
    for (const [[x, y, w, h], strength] of cells) {
      g.fillStyle = css(strength === 2 ? colours.bad : mix(colours.card, colours.bad, 0.45));
      g.fillRect(x, y, w, h);
    }
  }

  box(x, y, w, h) {
    const v = this.view, sx = this.width / v.w, sy = this.height / v.h;
    return [(x - v.x) * sx, (y - v.y) * sy, w * sx, h * sy];
  }

  outline(g) {
    if (this.all.w === this.columns && this.all.h === this.rows) return;
    const [x, y, w, h] = this.box(0, 0, this.columns, this.rows);
    g.strokeStyle = css(colours.ink);
    g.lineWidth = 2;
    g.strokeRect(Math.max(x, 1), Math.max(y, 1), Math.min(w, this.width) - 2, Math.min(h, this.height) - 2);
  }

  // Edges of the focused access, a ring around the wrong element that is looked at, and the cursor.
  drawFocus(g) {
    const {focus, ring} = this.state, t = this.tensor;
    if (focus && focus.tensor === t.id) {
      const places = [...focus.elements].map((k) => this.place(k));
      const [, , w, h] = this.box(0, 0, 1, 1);
      g.strokeStyle = css(colours.ink);
      g.lineWidth = 1.5;
      g.beginPath();
      if (Math.min(w, h) < 4)
        this.surround(g, places);
      else
        this.traceEdges(g, places, focus.elements);
      g.stroke();
    }
    if (ring && ring.tensor === t.id) {
      const at = this.place(ring.index);
      this.mark(g, at, colours.card, 6);
      this.mark(g, at, colours.wrong, 3);
    }
  }
  // The edges of a set of elements; where they are too small for that, a frame around all of them.
  traceEdges(g, places, elements) {
    const v = this.view, gap = this.gap;
    for (const {x, y} of places) {
      if (x < v.x || y < v.y || x >= v.x + v.w || y >= v.y + v.h) continue;
      const [l, top, w, h] = this.box(x, y, 1, 1);
      const edge = (dx, dy, x1, y1, x2, y2) => {
        const next = this.index(x + dx, y + dy);
        if (next !== null && elements.has(next)) return;
        g.moveTo(x1, y1);
        g.lineTo(x2, y2);
      };
      edge(-1, 0, l, top, l, top + h);
      edge(1, 0, l + w - gap, top, l + w - gap, top + h);
      edge(0, -1, l, top, l + w, top);
      edge(0, 1, l, top + h - gap, l + w, top + h - gap);
    }
  }
  surround(g, places) {
    const v = this.view, max = {x: -Infinity, y: -Infinity}, min = {x: Infinity, y: Infinity};
    for (const {x, y} of places) {
      if (x < v.x || y < v.y || x >= v.x + v.w || y >= v.y + v.h) continue;
      min.x = Math.min(min.x, x);
      min.y = Math.min(min.y, y);
      max.x = Math.max(max.x, x);
      max.y = Math.max(max.y, y);
    }
    if (max.x < min.x) return;
    const [x, y, w, h] = this.box(min.x, min.y, max.x - min.x + 1, max.y - min.y + 1);
    const left = Math.max(x - 3, 1), top = Math.max(y - 3, 1);
    g.rect(left, top, Math.min(x + w + 3, this.width - 1) - left, Math.min(y + h + 3, this.height - 1) - top);
  }

  mark(g, at, colour, width) {
    const [x, y, w, h] = this.box(at.x, at.y, 1, 1);
    g.strokeStyle = css(colour);
    g.lineWidth = width;
    g.strokeRect(x - 1, y - 1, Math.max(w - this.gap, 3) + 2, Math.max(h - this.gap, 3) + 2);
  }

  showLegend(poolX, poolY) {
    const parts = [this.missing, this.scale].filter(Boolean);
    if (poolX * poolY > 1) parts.push(`a cell is ${this.rows > 1 ? `${poolY} × ${poolX}` : poolX} elements`);
    this.legend.textContent = parts.join(' · ');
    this.canvas.dataset.mode = this.missing ? 'footprint' : this.state.mode;
  }

  describe() {
    const t = this.tensor, maps = mapsOf(t), at = this.cursor, k = at ? this.index(at.x, at.y) : null;
    if (k === null) {
      this.readout.textContent = this.text;
      return;
    }
    if (k < 0 || k >= t.size) {
      const lanes = maps.outside.get(k);
      this.readout.textContent = `${t.name}[${k}] is out of bounds (${plural(t.size, 'element')})` +
          (lanes ? `: ${plural(lanes, 'lane')}` : '');
      return;
    }
    const words = [elementName(t, k)];
    if (maps.unwritten[k])
      words[0] += ': never written';
    else if (t.values)
      words[0] += ` = ${valueText(t.values[k])}`;
    if (t.expected && t.values && isWrong(t, k)) words[0] += `, expected ${valueText(t.expected[k])}`;
    if (racesOf(t)[k]) words.push('race: several programs use it, and one of them writes it');
    if (maps.uninitialized[k]) words.push('read before anybody wrote it');
    if (maps.reads[k]) words.push(`read ${plural(maps.reads[k], 'time')}, last by ${this.user(maps.reader[k])}`);
    if (maps.writes[k]) words.push(`written ${plural(maps.writes[k], 'time')}, last by ${this.user(maps.writer[k])}`);
    if (maps.redundancy[k] > 1) words.push(plural(maps.redundancy[k], 'program'));
    if (!maps.reads[k] && !maps.writes[k]) words.push('not used');
    this.readout.textContent = words.join(' · ');
  }
  user(i) {
    const r = record(i - 1);
    return `program ${programName(r.program)} at line ${r.site.line}`;
  }

  summary(maps) {
    const words = [];
    let outside = 0, uninitialized = 0, never = 0;
    const racing = racesOf(this.tensor).reduce((sum, is) => sum + is, 0);
    for (const lanes of maps.outside.values()) outside += lanes;
    for (let k = 0; k < this.tensor.size; ++k) {
      uninitialized += maps.uninitialized[k];
      never += maps.unwritten[k];
    }
    if (outside)
      words.push(
          `${plural(outside, 'lane')} out of bounds, red, outside of the tensor` +
          (this.far ? ` (${plural(this.far, 'lane')} farther away than the margin shows)` : ''));
    if (racing) words.push(`${plural(racing, 'element')} in a race, marked yellow`);
    if (uninitialized) words.push(`${plural(uninitialized, 'element')} read before anybody wrote them, hatched red`);
    if (never) words.push(`${plural(never, 'element')} never written, hatched`);
    return words.join(' · ');
  }
}
