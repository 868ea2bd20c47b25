// Who feeds whom: dots on a ring, learners within it, and a wedge from each giver to each taker.

import { number, plural, s, say, short } from "./format.js";

const WIDTH = 440, HEIGHT = 392, MIDDLE_X = WIDTH / 2, MIDDLE_Y = HEIGHT / 2, RING = 132, UPRIGHT_MAX = 14;

export class Map_ {
  constructor(place, caption) {
    this.caption = caption;
    this.svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", tabindex: 0, "aria-label": "Map of nodes; the arrow keys go from one to the next" });
    this.edges = s("g"); this.dots = s("g");
    this.svg.append(this.edges, this.dots);
    place.append(this.svg);
    this.picked = null; this.data = { dots: [], edges: [] }; this.drawn = "";
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.pick(null));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.pick(null);
    const ids = this.data.dots.map((dot) => dot.id);
    if (step === undefined || !ids.length) return;
    event.preventDefault();
    const from = ids.indexOf(this.picked);
    this.pick(ids[(from + step + ids.length + (from < 0 && step < 0 ? 1 : 0)) % ids.length]);
  }

  pick(id) {
    this.picked = id;
    this.draw();
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  draw() {
    const wanted = JSON.stringify([this.data, this.picked]);
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    const places = layout(this.data.dots);
    const most = Math.max(1, ...this.data.edges.map((edge) => edge[2]));
    this.svg.classList.toggle("picked", this.picked !== null);
    this.edges.replaceChildren(...this.data.edges.map((edge) => this.edge(edge, places, most)).filter(Boolean));
    this.dots.replaceChildren(...this.data.dots.map((dot) => this.dot(dot, places.get(dot.id))));
    say(this.caption, this.tell());
  }

  edge([giver, taker, groups, fresh], places, most) {
    const from = places.get(giver), to = places.get(taker);
    if (!from || !to || giver === taker) return null;
    const on = this.picked !== null && (giver === this.picked || taker === this.picked);
    const width = 1.2 + 6.5 * Math.sqrt(groups / most);
    return s("path", { class: `edge${fresh ? " fresh" : ""}${on ? " on" : ""}`, d: wedge(from, to, width) });
  }

  dot(dot, at) {
    const many = dot.id.startsWith("*");
    const kind = dot.gone && dot.gone === dot.count ? " gone" : dot.alarms ? " warn" : "";
    const group = s("g", { class: `dot${many ? " many" : kind}${dot.id === this.picked ? " on" : ""}` });
    const size = many ? 13 + Math.min(11, 2.2 * Math.log2(1 + dot.count)) : dot.centre ? 11 : 6.5;
    if (dot.role === "coordinator") group.append(s("rect", { x: at.x - size * 0.8, y: at.y - size * 0.8, width: 1.6 * size, height: 1.6 * size, rx: 2 }));
    else group.append(s("circle", { cx: at.x, cy: at.y, r: size }));
    if (many) group.append(s("text", { class: "count", x: at.x, y: at.y + 4, "text-anchor": "middle" }, dot.count ? number(dot.count) : "?"));
    group.append(s("text", isInner(dot) ? { x: at.x, y: at.y + size + 13, "text-anchor": "middle" } : beside(at, this.data.dots.length > UPRIGHT_MAX), name(dot)));
    group.append(s("title", {}, many ? `${plural(dot.count, "more node")}` : dot.id));
    group.addEventListener("pointerenter", () => this.pick(dot.id));
    group.addEventListener("pointerleave", () => this.pick(null));
    return group;
  }

  tell() {
    const { dots, edges, edges_left_out: left } = this.data;
    if (this.picked === null) {
      if (!edges.length) return "No node has trained on another's groups yet.";
      const groups = edges.reduce((sum, edge) => sum + edge[2], 0);
      return `${plural(groups, "group")} of others trained on, along ${plural(edges.length, "way")}${left ? `, and ${number(left)} more ways that are not drawn` : ""}.`;
    }
    const dot = dots.find((each) => each.id === this.picked);
    if (!dot) return "";
    const out = edges.filter((edge) => edge[0] === dot.id), taken = edges.filter((edge) => edge[1] === dot.id);
    const sum = (some) => number(some.reduce((total, edge) => total + edge[2], 0));
    const state = dot.gone && dot.gone === dot.count ? ", gone" : "";
    return `${name(dot)} (${dot.role}${state}) feeds ${out.length} with ${sum(out)} groups, and is fed ${sum(taken)} by ${taken.length}.`;
  }
}

function name(dot) {
  if (!dot.id.startsWith("*")) return short(dot.id);
  return dot.role === "unwatched" ? "unwatched" : `${dot.role}s`;
}

// Learners, coordinators and what stands for many nodes have their places within the ring.
function isInner(dot) {
  return dot.centre || dot.id.startsWith("*");
}

// A label outside of the ring: upright, or, where there are many, along its radius.
function beside({ angle }, turned) {
  const across = Math.cos(angle), at = ringed(angle, RING + (turned ? 12 : 16));
  if (!turned) return { x: at.x, y: at.y + 3.5, "text-anchor": across > 0.25 ? "start" : across < -0.25 ? "end" : "middle" };
  const left = across < -1e-9, degrees = (180 * angle) / Math.PI + (left ? 180 : 0);
  return { x: at.x, y: at.y, dy: 3.5, "text-anchor": left ? "end" : "start", transform: `rotate(${degrees.toFixed(1)} ${at.x.toFixed(1)} ${at.y.toFixed(1)})` };
}

function ringed(angle, far) {
  return { x: MIDDLE_X + far * Math.cos(angle), y: MIDDLE_Y + far * Math.sin(angle) };
}

function layout(dots) {
  const places = new Map();
  const centre = dots.filter(isInner), ring = dots.filter((dot) => !isInner(dot));
  centre.forEach((dot, place) => {
    const angle = (2 * Math.PI * place) / centre.length, far = centre.length > 1 ? 48 : 0;
    places.set(dot.id, { ...ringed(angle, far), angle });
  });
  ring.forEach((dot, place) => {
    const angle = (2 * Math.PI * place) / ring.length - Math.PI / 2;
    places.set(dot.id, { ...ringed(angle, RING), angle });
  });
  return places;
}

// Bent towards its right, so that there and back are two.
function wedge(from, to, width) {
  const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy) || 1;
  const nx = -dy / length, ny = dx / length, bend = 0.13 * length;
  const cx = (from.x + to.x) / 2 + nx * bend, cy = (from.y + to.y) / 2 + ny * bend;
  const point = (x, y, off) => `${(x + nx * off).toFixed(1)} ${(y + ny * off).toFixed(1)}`;
  return `M${point(from.x, from.y, width / 2)}Q${point(cx, cy, width / 4)} ${to.x.toFixed(1)} ${to.y.toFixed(1)}Q${point(cx, cy, -width / 4)} ${point(from.x, from.y, -width / 2)}Z`;
}
