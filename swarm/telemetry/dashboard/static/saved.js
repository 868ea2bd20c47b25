// What a saved report has beside the page: tables, a curve for each node, and broadcasts as bars.

import { Chart } from "./charts.js";
import { amount, fixed, h, percent, printable, s } from "./format.js";

const COLOURS = 8, KEYS_MAX = 16, ROW = 18, NAMES = 150, NOTES = 150, WIDTH_OF_BARS = 900;
const MARKS = { bound_s: "the least that the links allow", had_s: "the learner knows that it is there", used_s: "a lease is asked for with it" };

const style = (place) => `c${place % COLOURS} d${Math.floor(place / COLOURS) % 4}`;
const section = (title, ...parts) => h("section", { class: "saved" }, h("h2", {}, printable(title)), ...parts);
const half = (made) => { made.classList.add("half"); return made; };
const soft = (text) => (text ? h("p", { class: "soft" }, printable(text)) : null);

export function showSaved(main, report) {
  main.querySelectorAll(".saved").forEach((each) => each.remove());
  if (!report.charts.length) main.append(section("Curves", soft("Nothing was logged to draw yet.")));
  report.tables.forEach((each) => main.append(table(each)));
  report.charts.forEach((each) => chart(main, each));
  if (report.waterfall) main.append(waterfall(report.waterfall));
}

function table({ title, columns, rows, note }) {
  const row = (tag, cells) => h("tr", {}, ...cells.map((cell) => h(tag, {}, printable(cell))));
  const made = h("table", {}, h("thead", {}, row("th", columns)), h("tbody", {}, ...rows.map((cells) => row("td", cells))));
  return section(title, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": printable(title) }, made), soft(note));
}

function chart(main, { title, x_name, unit, caption, x, lines }) {
  const write = unit === "share" ? percent : (value) => amount(value, unit);
  const place = h("div", { class: "chart tall" });
  const shown = lines.slice(0, KEYS_MAX);
  const keys = shown.map((line, at) => h("span", { class: `key ${style(at)}` }, printable(line.name)));
  const more = lines.length > shown.length ? [`the first ${shown.length} of ${lines.length}`] : [];
  main.append(half(section(title, place, h("p", { class: "legend" }, ...keys, ...more, `over: ${x_name}`), soft(caption))));
  const at = (value) => amount(value);
  const drawn = new Chart(place, { label: title, write, at, bridge: true, lines: lines.map((line, n) => ({ name: printable(line.name), key: n, style: style(n) })) });
  drawn.show(Object.assign({ t: x }, lines.map((line) => line.y)));
}

function waterfall({ title, caption, phases, rows }) {
  const bars = rows.flatMap((row) => row.bars);
  const marks = rows.flatMap((row) => Object.keys(MARKS).map((name) => row[name] ?? 0));
  const low = Math.min(0, ...bars.map((bar) => bar.start_s)), high = Math.max(0.1, ...marks, ...bars.map((bar) => bar.end_s));
  const x = (value) => NAMES + ((value - low) / (high - low)) * (WIDTH_OF_BARS - NAMES - NOTES);
  const names = Object.keys(phases);
  const parts = rows.flatMap((row, place) => {
    const y = ROW * place, end = Math.max(0, ...row.bars.map((bar) => bar.end_s), ...Object.keys(MARKS).map((name) => row[name] ?? 0));
    return [
      s("text", { x: NAMES - 8, y: y + 13, "text-anchor": "end" }, printable(row.name)),
      ...row.bars.map((bar) => s("rect", { class: `bar ${style(names.indexOf(bar.phase))}`, x: x(bar.start_s), y: y + 3, width: Math.max(1, x(bar.end_s) - x(bar.start_s)), height: ROW - 6 }, s("title", {}, `${phases[bar.phase]}: ${fixed(bar.start_s, 2)} to ${fixed(bar.end_s, 2)} s`))),
      ...Object.entries(MARKS).filter(([name]) => row[name] !== null).map(([name, told]) => s("path", { class: `sign ${name}`, d: `M${x(row[name])} ${y + 1}V${y + ROW - 1}` }, s("title", {}, `${told}: ${fixed(row[name], 2)} s`))),
      s("text", { x: x(end) + 8, y: y + 13 }, printable(row.note)),
    ];
  });
  const height = ROW * rows.length + ROW;
  parts.push(s("text", { x: x(0), y: height - 3, "text-anchor": "middle" }, "0 s"), s("text", { x: x(high), y: height - 3, "text-anchor": "middle" }, `${fixed(high, 1)} s`));
  const keys = names.map((name, place) => h("span", { class: `key ${style(place)}` }, phases[name]));
  const marked = Object.entries(MARKS).map(([name, told]) => h("span", { class: `key sign ${name}` }, told));
  return section(title, h("div", { class: "scroll" }, s("svg", { class: "waterfall", viewBox: `0 0 ${WIDTH_OF_BARS} ${height}`, role: "img", "aria-label": "Phases of each version, in seconds since it was published" }, ...parts)),
    h("p", { class: "legend" }, ...keys, ...marked, "over: seconds since the version was published"), soft(caption));
}
