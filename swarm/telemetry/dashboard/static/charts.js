// Lines over time, as SVG in the size they are shown; a pointer or the arrow keys read values.

import { clock, h, missing, s, say } from "./format.js";

const LEFT = 52, BOTTOM = 18, TOP = 6;

export class Chart {
  // lines: [{name, key, style}]; band: [low, high] keys; write: a value as text; top: fixed maximum;
  // at: a place on the axis as text; bridge: a line goes on over places without a value
  constructor(place, { label, lines, band = null, area = null, write, top = null, at = clock, bridge = false }) {
    Object.assign(this, { place, label, lines, band, area, write, top, where: at, bridge, data: null, at: null });
    this.readout = h("span", { class: "readout", hidden: true });
    this.none = h("p", { class: "none" }, "Nothing to draw yet.");
    this.svg = s("svg", { role: "img", tabindex: 0 });
    place.append(this.svg, this.none, this.readout);
    new ResizeObserver(() => this.draw()).observe(place);
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => this.move(null));
    this.svg.addEventListener("blur", () => this.move(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  get count() {
    return this.data ? this.data.t.length : 0;
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") this.move(null);
    if (step === undefined || !this.count) return;
    event.preventDefault();
    const from = this.at === null ? this.count - 1 : this.at;
    this.move(Math.min(this.count - 1, Math.max(0, from + step)));
  }

  point(x) {
    if (!this.count) return;
    const width = this.place.clientWidth - LEFT;
    const { t } = this.data;
    const wanted = t[0] + ((x - LEFT) / width) * (t[t.length - 1] - t[0]);
    let best = 0;
    t.forEach((each, place) => { if (Math.abs(each - wanted) < Math.abs(t[best] - wanted)) best = place; });
    this.move(best);
  }

  move(at) {
    this.at = at;
    this.draw();
  }

  values() {
    const keys = [...this.lines.map((line) => line.key), ...(this.band || [])];
    return keys.flatMap((key) => this.data[key].filter((value) => !missing(value)));
  }

  draw() {
    const width = this.place.clientWidth, height = this.place.clientHeight;
    const values = this.data ? this.values() : [];
    const empty = this.count < 2 || this.data.t[0] === this.data.t[this.count - 1] || values.length < 2 || width < LEFT + 20;
    this.none.hidden = !empty;
    this.svg.toggleAttribute("hidden", empty);
    this.svg.style.display = empty ? "none" : "block";
    if (empty) return;
    const { t } = this.data;
    const [low, high] = this.top === null ? nice(Math.min(0, ...values), Math.max(...values)) : [0, this.top];
    const x = (time) => LEFT + ((time - t[0]) / (t[t.length - 1] - t[0] || 1)) * (width - LEFT);
    const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (height - TOP - BOTTOM);
    const parts = [];
    for (const tick of [low, (low + high) / 2, high]) {
      parts.push(s("line", { class: "grid", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }));
      parts.push(s("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, this.write(tick)));
    }
    parts.push(s("text", { x: LEFT, y: height - 2 }, this.where(t[0])));
    parts.push(s("text", { x: width, y: height - 2, "text-anchor": "end" }, this.where(t[t.length - 1])));
    if (this.band) parts.push(s("path", { class: "band", d: this.between(x, y) }));
    for (const line of this.lines) {
      const d = path(t, this.data[line.key], x, y, this.bridge);
      if (line.key === this.area) parts.push(s("path", { class: "area", d: closed(t, this.data[line.key], x, y, y(low)) }));
      parts.push(s("path", { class: `line ${line.style}`, d }));
    }
    if (this.at !== null && this.at < t.length) parts.push(s("line", { class: "cursor", x1: x(t[this.at]), x2: x(t[this.at]), y1: TOP, y2: height - BOTTOM }));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    this.tell();
  }

  tell() {
    const at = this.at === null ? this.count - 1 : Math.min(this.at, this.count - 1);
    const text = this.lines.map((line) => `${line.name} ${this.write(this.data[line.key][at])}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.label}, ${this.where(this.data.t[at])}: ${text}`);
    this.readout.hidden = this.at === null;
    say(this.readout, `${this.where(this.data.t[at])}  ${text}`);
  }

  between(x, y) {
    const [low, high] = this.band.map((key) => this.data[key]);
    const there = this.data.t.map((_, place) => place).filter((place) => !missing(low[place]) && !missing(high[place]));
    const up = there.map((place) => `${x(this.data.t[place])} ${y(high[place])}`);
    const down = there.reverse().map((place) => `${x(this.data.t[place])} ${y(low[place])}`);
    return up.length ? `M${[...up, ...down].join("L")}Z` : "";
  }
}

// A gap in the values is a gap in the line, unless it is bridged.
function path(times, values, x, y, bridge) {
  let d = "", open = false;
  values.forEach((value, place) => {
    if (missing(value)) { open &&= bridge; return; }
    d += `${open ? "L" : "M"}${x(times[place]).toFixed(1)} ${y(value).toFixed(1)}`;
    open = true;
  });
  return d;
}

function closed(times, values, x, y, base) {
  const there = values.map((value, place) => [value, place]).filter(([value]) => !missing(value));
  if (!there.length) return "";
  const points = there.map(([value, place]) => `${x(times[place]).toFixed(1)} ${y(value).toFixed(1)}`);
  return `M${x(times[there[0][1]])} ${base}L${points.join("L")}L${x(times[there[there.length - 1][1]])} ${base}Z`;
}

function nice(low, high) {
  const span = high - low || Math.abs(high) || 1;
  const unit = 10 ** Math.floor(Math.log10(span));
  const step = [0.2, 0.4, 1, 2].map((each) => each * unit).find((each) => span / each <= 5) || unit * 2;
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step];
}
