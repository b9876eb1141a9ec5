// The grid of programs: which one is selected, and what each of them costs.

const programGrid = {
  build() {
    const box = byId('programs');
    element('h3', box, {textContent: kPrograms === 1 ? 'One program' : plural(kPrograms, 'program')});
    if (kPrograms <= 1) return;
    const tools = element('div', box, {className: 'tools'});
    this.all = element('button', tools, {type: 'button', textContent: 'all'});
    this.all.addEventListener('click', () => choose({program: -1}));
    this.play = element('button', tools, {type: 'button', textContent: '▶ play'});
    this.play.addEventListener('click', () => this.toggle());
    const label = element('label', tools, {textContent: 'colour '});
    const select = element('select', label);
    for (const [value, text] of [
             ['bytes', 'bytes'], ['masked', 'masked-off lanes'], ['problems', 'problems'], ['accesses', 'accesses']]) {
      element('option', select, {value, textContent: text});
    }
    select.addEventListener('change', () => choose({colour: select.value}));
    this.count = Math.min(kPrograms, 65536);
    const flat = grid[1] * grid[2] === 1;
    this.columns = flat ? Math.min(grid[0], 32) : grid[0];
    this.rows = flat ? Math.ceil(this.count / this.columns) : grid[1];
    this.planes = flat ? 1 : grid[2];
    const scroll = element('div', box, {className: 'grid'});
    this.canvas = element('canvas', scroll, {tabIndex: 0});
    this.canvas.setAttribute('role', 'application');
    this.canvas.setAttribute('aria-label', 'Programs: arrow keys choose one, Escape all, space plays them in order');
    this.shown = element('p', box, {className: 'readout'});
    this.shown.setAttribute('aria-live', 'polite');
    this.gather();
    this.canvas.addEventListener('click', (event) => {
      const number = this.under(event);
      if (number >= 0) choose({program: number === selection.program ? -1 : number});
    });
    this.canvas.addEventListener('mousemove', (event) => this.describe(this.under(event)));
    this.canvas.addEventListener('mouseleave', () => this.describe(selection.program));
    this.canvas.addEventListener('keydown', (event) => this.key(event));
  },

  gather() {
    this.stats = {
      bytes: new Float64Array(kPrograms),
      masked: new Float64Array(kPrograms),
      problems: new Float64Array(kPrograms),
      accesses: new Float64Array(kPrograms)
    };
    for (const program of recordsOf.keys()) {
      for (const access of accessesOf(program)) {
        const tensor = launch.tensors[access.site.tensor], races = racesOf(tensor);
        this.stats.bytes[program] += access.active * tensor.bytes;
        this.stats.masked[program] += access.masked;
        ++this.stats.accesses[program];
        for (const r of access.records) {
          eachElement(r, (k) => {
            if (k < 0 || k >= tensor.size || races[k]) ++this.stats.problems[program];
          });
        }
      }
    }
    for (const f of launch.findings) this.stats.problems[f.program] = Math.max(1, this.stats.problems[f.program]);
  },

  place(number) {
    const plane = Math.floor(number / (this.columns * this.rows)), rest = number % (this.columns * this.rows);
    return {x: rest % this.columns + plane * (this.columns + 1), y: Math.floor(rest / this.columns)};
  },
  under(event) {
    const x = Math.floor(event.offsetX / this.side), y = Math.floor(event.offsetY / this.side);
    const plane = Math.floor(x / (this.columns + 1)), column = x % (this.columns + 1);
    const number = (plane * this.rows + y) * this.columns + column;
    return column < this.columns && y < this.rows && number >= 0 && number < this.count ? number : -1;
  },
  key(event) {
    const now = selection.program, row = this.columns, plane = this.columns * this.rows;
    const moves = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, PageUp: -plane, PageDown: plane};
    if (event.key in moves) {
      const next = now < 0 ? 0 : now + moves[event.key];
      if (next >= 0 && next < this.count) choose({program: next});
    } else if (event.key === 'Home')
      choose({program: 0});
    else if (event.key === 'End')
      choose({program: this.count - 1});
    else if (event.key === 'Escape')
      choose({program: -1});
    else if (event.key === ' ')
      this.toggle();
    else
      return;
    event.preventDefault();
  },
  toggle() {
    if (this.timer) {
      clearInterval(this.timer);
      this.timer = 0;
    } else {
      choose({program: selection.program < 0 || selection.program + 1 >= this.count ? 0 : selection.program + 1});
      this.timer = setInterval(() => {
        if (selection.program + 1 < this.count)
          choose({program: selection.program + 1});
        else
          this.toggle();
      }, Math.max(40, Math.min(500, 6000 / this.count)));
    }
    this.play.textContent = this.timer ? '■ stop' : '▶ play';
  },

  describe(number) {
    if (number < 0) {
      this.shown.textContent =
          selection.program < 0 ? 'All programs together.' : `Program ${programName(selection.program)} is selected.`;
      return;
    }
    const s = this.stats, words = [`Program ${programName(number)}`];
    if (!recordsOf.has(number))
      words.push(launch.left_out > 0 ? 'not in the sample' : 'accesses nothing');
    else
      words.push(
          plural(s.accesses[number], 'access').replace('accesss', 'accesses'), plural(s.bytes[number], 'byte'),
          `${plural(s.masked[number], 'lane')} masked off`);
    if (s.problems[number]) words.push('has problems');
    this.shown.textContent = words.join(' · ');
  },

  show() {
    if (!this.canvas) return;
    const g = this.canvas.getContext('2d'), dpr = window.devicePixelRatio || 1;
    const wide = this.planes * (this.columns + 1) - 1;
    const room = Math.max(this.canvas.parentNode.clientWidth - 4, 100);
    this.side = Math.max(3, Math.min(24, Math.floor(room / wide)));
    const width = wide * this.side, height = this.rows * this.side;
    Object.assign(this.canvas.style, {width: `${width}px`, height: `${height}px`});
    Object.assign(this.canvas, {width: width * dpr, height: height * dpr});
    g.scale(dpr, dpr);
    const data = this.stats[selection.colour], gap = this.side >= 7 ? 2 : this.side > 3 ? 1 : 0;
    let max = 0;
    for (let i = 0; i < this.count; ++i) max = Math.max(max, data[i]);
    const full =
        {bytes: colours.load, masked: colours.soft, problems: colours.bad, accesses: colours.many}[selection.colour];
    for (let i = 0; i < this.count; ++i) {
      const {x, y} = this.place(i), side = this.side - gap;
      const share = max ? data[i] / max : 0;
      g.fillStyle = css(share ? mix(colours.cell, full, 0.2 + 0.65 * share) : colours.cell);
      g.fillRect(x * this.side, y * this.side, side, side);
      if (this.stats.problems[i] && selection.colour !== 'problems') {
        const dot = Math.max(2, side / 3);
        g.fillStyle = css(colours.bad);
        g.fillRect(x * this.side + side - dot, y * this.side, dot, dot);
      }
    }
    if (selection.program >= 0) {
      const {x, y} = this.place(selection.program);
      g.strokeStyle = css(colours.ink);
      g.lineWidth = 2;
      g.strokeRect(
          x * this.side + 1, y * this.side + 1, Math.max(this.side - gap - 2, 1), Math.max(this.side - gap - 2, 1));
    }
    this.all.setAttribute('aria-pressed', selection.program < 0);
    this.describe(selection.program);
  },
};
