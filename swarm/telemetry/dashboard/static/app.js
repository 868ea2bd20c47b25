// The page hands each part its figures.

import { Chart } from "./charts.js";
import { DASH, amount, clock, duration, fixed, h, missing, number, percent, plural, printable, s, say, scaled, short } from "./format.js";
import { Map_ } from "./map.js";
import { showSaved } from "./saved.js";
import { Stream } from "./stream.js";
import { ROWS_SHOWN, Table, bars, pairs } from "./tables.js";

const $ = (id) => document.getElementById(id);
const alarmName = (kind) => printable(kind[0].toUpperCase() + kind.slice(1)).replaceAll("_", " ");
let frame = null, all = null, chosen = null, showAll = false, span = "recent";

const rate = (value) => amount(value, "B/s");
const throughput = new Chart($("throughput-chart"), {
  label: "Network throughput", area: "in_bytes_per_s", write: rate,
  lines: [{ name: "received", key: "in_bytes_per_s", style: "s-in" }, { name: "sent", key: "out_bytes_per_s", style: "s-out" }],
});
const heldOut = new Chart($("held-out-chart"), {
  label: "Held-out pass rate", write: (value) => (missing(value) ? DASH : `${Math.round(100 * value)} %`), top: 1,
  lines: [{ name: "mean", key: "held_out", style: "s-in" }], band: ["held_out_low", "held_out_high"],
});
const reward = new Chart($("reward-chart"), {
  label: "Reward of own completions", write: (value) => fixed(value, 2),
  lines: [{ name: "mean", key: "reward", style: "s-in" }], band: ["reward_low", "reward_high"],
});
const map = new Map_($("map-drawing"), $("map-caption"));

const whole = (v) => number(v);
const seconds = (value) => (missing(value) ? DASH : duration(value));
const nodes = new Table($("node-table"), [
  { name: "node", key: "id", write: short },
  { name: "role", key: "role", text: true, write: (role, row) => (row.phase ? `${role}, ${printable(row.phase)}` : role) },
  { name: "round", key: "round", write: whole },
  { name: "version", key: "version", write: whole },
  { name: "reward", key: "reward", write: (v) => fixed(v, 3) },
  { name: "held-out", key: "held_out", write: percent },
  { name: "received", key: "in_bytes_per_s", write: rate, title: "from peers, a second" },
  { name: "sent", key: "out_bytes_per_s", write: rate, title: "to peers, a second" },
  { name: "peers", key: "peers", write: whole },
  { name: "accepted", key: "accepted", write: whole, title: "groups of others that passed every check" },
  { name: "refused", key: "rejected", write: whole },
  { name: "J", key: "foreign_groups", write: (v, row) => (missing(v) || missing(row.foreign_wanted) ? DASH : `${number(v)} of ${number(row.foreign_wanted)}`), title: "foreign groups trained on in the last round" },
  { name: "tokens/s", key: "tokens_per_s", write: (v) => amount(v) },
  { name: "heard", key: "heard_s", write: (v, row) => (row.gone ? `${row.left ? "left" : "gone"}, ${duration(v)} ago` : `${duration(v)} ago`) },
], {
  identity: (row) => row.id,
  classes: (row) => (row.left ? "gone left" : row.gone ? "gone" : row.alarms.length ? "warn" : ""),
  detail: (row) => [
    ["peer id", printable(row.id)], ["program", printable(row.agent)], ["up", seconds(row.uptime_s)],
    ["received in all", `${number(row.in_bytes)} bytes`], ["sent in all", `${number(row.out_bytes)} bytes`],
    ["sends most to", row.sends_to.map(([id, v]) => `${short(id)} ${rate(v)}`).join(", ") || "nobody"],
    ["memory", amount(row.memory_bytes, "B")], ["groups of peers trained on", number(row.trained_groups)],
    ["alarms", row.alarms.map(alarmName).join(", ") || "none"], ["reports lost", number(row.lost)],
  ],
});
const workers = new Table($("worker-table"), [
  { name: "worker", key: "name", text: true, write: printable },
  { name: "id", key: "id", text: true, write: (id) => (id ? short(id) : DASH) },
  { name: "phase", key: "phase", text: true, write: (v) => printable(v || DASH) },
  { name: "version", key: "version", write: whole },
  { name: "behind", key: "behind", write: whole, title: "versions behind the newest" },
  { name: "groups/s", key: "groups_per_s", write: (v) => fixed(v, 3) },
  { name: "$/h", key: "price_per_h", write: (v) => fixed(v, 2) },
  { name: "admitted", key: "admitted", write: whole },
  { name: "refused", key: "refused", write: whole },
  { name: "leased", key: "leased", write: whole },
  { name: "heard", key: "heard_s", write: (v) => (missing(v) ? "never" : `${duration(v)} ago`) },
], { identity: (row) => row.id || row.name });

const valued = (v, row) => amount(v, row.unit === "bytes" ? "B" : "");
const allFigures = new Table($("figure-table"), [
  { name: "figure", key: "name", text: true, write: (name) => name },
  { name: "unit", key: "unit", text: true, write: (unit) => unit },
  { name: "lowest", key: "low", write: valued },
  { name: "middle", key: "middle", write: valued },
  { name: "highest", key: "high", write: valued },
  { name: "nodes", key: "nodes", write: whole },
  { name: "what it is", key: "help", text: true, write: (help) => help },
], { identity: (row) => row.name });

function records({ columns, rows }) {
  return rows.map((row) => Object.fromEntries(columns.map((name, place) => [name, row[place]])));
}

function enter(state, link, banner = "") {
  document.body.dataset.state = state;
  say($("link-text"), link);
  $("banner").hidden = !banner;
  if (banner) say($("banner"), banner);
}

function onLost(why, silentS) {
  if (frame === null) {
    enter("error", "not connected");
    say($("verdict-text"), "Not connected");
    say($("verdict-detail"), `Nothing was shown yet: ${why}. This page tries again every few seconds.`);
    return;
  }
  const since = Date.now() / 1000 - silentS;
  enter("lost", "not connected", `Not connected since ${clock(since)} (${duration(silentS)}): ${why}. What is shown is from then; this page tries again every few seconds.`);
}

function onFrame(state) {
  all = state;
  try {
    show(choose(state));
  } catch (error) {
    enter("error", "error", "");
    say($("verdict-text"), "This page failed to show what it got");
    say($("verdict-detail"), `${error}. Reload it; if that does not help, this server and this page differ in version.`);
    throw error;
  }
}

// The page shows one run.
function choose(state) {
  const pages = { [state.runs[0] || ""]: state, ...state.others }, names = Object.keys(pages).sort(), place = $("runs");
  if (!pages[chosen]) chosen = state.runs[0] || "";
  const told = names.map((run) => `${printable(run)}${pages[run].alarms.kinds ? `, ${plural(pages[run].alarms.kinds, "alarm")}` : ""}`);
  if (choose.told !== String(told)) place.replaceChildren(...names.map((run, at) => h("option", { value: run }, told[at])));
  choose.told = String(told);
  place.value = chosen;
  place.disabled = names.length < 2;
  return pages[chosen];
}

function show(state) {
  frame = state;
  document.title = `${state.alarms.shown.length ? `(${state.alarms.kinds}) ` : ""}swarm`;
  if (state.saved) saved(state);
  else verdict(state);
  telemetry(state);
  if (!state.headline.nodes) return;
  alarms(state.alarms);
  figures(state.headline, state.capacity);
  curves();
  bars($("protocol-list"), both(state), (v) => amount(v, "B"), "", "No bytes were counted yet.");
  map.show(state.feeding);
  broadcast(state.broadcast);
  capacity(state.capacity);
  showWorkers(state.workers, state.can_act);
  showNodes();
  allFigures.show(records(state.figures));
  refused(state);
  notes(state.notes);
}

function saved({ saved: report, unix_s }) {
  enter("saved", `saved, up to ${new Date(1000 * unix_s).toLocaleString("en-GB")}`);
  document.title = printable(report.title);
  say($("verdict-text"), printable(report.title));
  say($("verdict-detail"), report.sentences.map(printable).join(" "));
  showSaved(document.querySelector("main"), report);
}

function verdict(state) {
  const { headline: head, source } = state;
  const broken = source.connected === false;
  $("verdict-hint").hidden = true;
  if (broken) {
    const since = missing(source.away_s) ? "" : ` since ${clock(state.unix_s - source.away_s)} (${duration(source.away_s)})`;
    enter(head.nodes ? "stale" : "empty", "no broker", `The broker ${printable(source.name)} does not answer${since}. Nodes go on without it; what is shown is what was heard last. It is tried again all the time.`);
  } else if (state.failing) enter("stale", "failing", `Nothing could be made of what was heard since ${clock(state.unix_s)}: what is shown is from then.`);
  else enter(head.nodes ? "live" : "empty", "live");
  if (!head.nodes) {
    say($("verdict-text"), broken ? "The broker does not answer" : head.heard_of ? "Nobody reports any more" : "Nobody reports yet");
    say($("verdict-detail"), `This page listens at ${printable(source.name)}. Nodes that are started with the following flag show up here within seconds.`);
    say($("verdict-hint"), `swarm-node join --telemetry ${printable(source.flag || "mqtt://HOST:1883")}`);
    $("verdict-hint").hidden = false;
    return;
  }
  const all = head.present === head.nodes;
  const kinds = state.alarms.kinds;
  const text = kinds ? `${plural(kinds, "alarm")} ${kinds === 1 ? "needs" : "need"} attention`
    : !head.present && !broken ? "Nobody reports any more"
    : head.gone_lately ? `${plural(head.gone_lately, "node")} ${head.gone_lately === 1 ? "is" : "are"} gone`
      : broken ? "As it was when it was last heard of" : "All is well";
  say($("verdict-text"), text);
  const roles = Object.entries(head.roles).map(([role, count]) => plural(count, role)).join(", ");
  const there = all ? `All ${plural(head.nodes, "node")} ${head.nodes === 1 ? "reports" : "report"}` : `${number(head.present)} of ${plural(head.nodes, "node")} report`;
  say($("verdict-detail"), `${there}${Object.keys(head.roles).length > 1 ? ` (${roles})` : ""}. ${sharing(head)}${others()}`);
}

function others() {
  return $("runs").length < 2 ? "" : ` This is one of ${$("runs").length} runs; choose another above.`;
}

function sharing(head) {
  if (missing(head.foreign_groups) || !head.foreign_wanted) return `${number(head.accepted)} groups of others were accepted so far.`;
  const trains = `A round trains on ${fixed(head.foreign_groups, 1)} foreign groups of ${fixed(head.foreign_wanted, 1)} wanted`;
  const share = missing(head.foreign_gradient_ratio) ? "" : `, which give ${fixed(100 * head.foreign_gradient_ratio, 0)} % of the gradient`;
  const brings = missing(head.sharing_per_token_ratio) ? "" : ` Sharing brings ${fixed(head.sharing_per_token_ratio, 1)} times the groups that teach for each token generated.`;
  return `${trains}${share}.${brings}`;
}

function alarms({ shown, kinds }) {
  $("alarms").hidden = !kinds;
  const wanted = JSON.stringify(shown);
  if (wanted === alarms.drawn) return;
  alarms.drawn = wanted;
  $("alarm-list").replaceChildren(...shown.map((alarm) => h("li", { class: alarm.level },
    h("strong", {}, `${alarmName(alarm.kind)}: ${printable(alarm.text)}`),
    h("p", {}, printable(alarm.advice)),
    h("p", { class: "who" }, `${plural(alarm.count, "node")}: `, h("span", { class: "id" }, alarm.nodes.map(short).join(" ")), alarm.count > alarm.nodes.length ? ` and ${number(alarm.count - alarm.nodes.length)} more` : ""))));
}

function figures(head, model) {
  const plain = (value) => [number(value), ""];
  const spread = head.round_low !== head.round_high ? `from ${number(head.round_low)} to ${number(head.round_high)}` : seconds(head.round_s) === DASH ? "" : `${fixed(head.round_s, 1)} s each`;
  const judged = (head.accepted || 0) + (head.rejected || 0);
  const entries = [
    ["Nodes", plain(head.present), absent(head)],
    ["Throughput", scaled(head.in_bytes_per_s, "B/s"), `${amount(head.in_bytes, "B")} received`],
    [head.roles.learner ? "Step" : "Round", plain(head.round), spread],
    ["Held-out", missing(head.held_out) ? [DASH, ""] : [(100 * head.held_out).toFixed(1), "%"], "pass rate, mean"],
    ["Reward", [fixed(head.reward, 3), ""], "own, mean"],
    ["Generating", scaled(head.tokens_per_s, ""), "tokens a second"],
    ["Refused", judged ? [(100 * head.rejected / judged).toFixed(1), "%"] : [DASH, ""], `${number(head.rejected)} of ${number(judged)}`],
    model && !missing(model.cost_per_h) ? ["Workers cost", [model.cost_per_h.toFixed(2), "$/h"], "by their prices"]
      : ["Pool", scaled(head.pool_groups), `groups, ${amount(head.pool_bytes, "B")}`],
  ];
  const list = $("figures");
  entries.forEach(([label, [value, unit], more], place) => {
    if (!list.children[place]) list.append(h("div", { "data-figure": label }, h("dt"), h("dd", { class: "value" }, h("span"), h("small")), h("dd", { class: "more" })));
    const [dt, dd, rest] = list.children[place].children;
    list.children[place].dataset.figure = label;
    say(dt, label); say(dd.children[0], value); say(dd.children[1], unit); say(rest, more);
  });
  while (list.children.length > entries.length) list.lastChild.remove();
}

function absent(head) {
  const left = head.left || 0, gone = head.gone - left;
  return [gone ? `${number(gone)} gone` : "", left ? `${number(left)} left` : ""].filter(Boolean).join(", ") || "all present";
}

function curves() {
  throughput.show(frame.history[span]);
  heldOut.show(frame.history[span]);
  reward.show(frame.history[span]);
}

function both(state) {
  const sums = new Map();
  for (const [part, list] of [[0, state.protocols_in], [1, state.protocols_out]]) {
    for (const [name, value] of list) {
      const pair = sums.get(name) || [0, 0];
      pair[part] = value;
      sums.set(name, pair);
    }
  }
  return [...sums].map(([name, [taken, given]]) => [printable(name), Math.max(taken, given), `${amount(taken, "B")} in, ${amount(given, "B")} out`]).sort((a, b) => b[1] - a[1]);
}

function broadcast(data) {
  $("broadcast").hidden = !data;
  if (!data) return;
  const took = [
    [data.broadcast_s, (v) => `the last one took ${fixed(v, 1)} s at the slowest node`],
    [data.broadcast_bound_ratio, (v) => `${fixed(v, 2)} times the least that the links allow`],
    [data.paused_s, (v) => `sampling paused ${fixed(v, 2)} s`],
  ].filter(([value]) => !missing(value)).map(([value, write]) => `; ${write(value)}`).join("");
  say($("broadcast-text"), `Version ${number(data.version)}: ${amount(data.size_bytes, "B")} in ${plural(data.chunks, "chunk")}, complete at ${number(data.complete)} of ${plural(data.nodes, "node")}${took}.`);
  const wanted = JSON.stringify([data.swarm, data.rows]);
  if (wanted === broadcast.drawn) return;
  broadcast.drawn = wanted;
  const rows = data.complete === data.nodes ? [] : data.rows;
  $("broadcast-rows").replaceChildren(
    piece("swarm", "all nodes", data.swarm, data.share),
    ...rows.map(([peer, share, cells]) => piece("", short(peer), cells, share)),
    ...(data.left_out && rows.length ? [h("p", { class: "soft" }, `and ${plural(data.left_out, "node")} that miss less`)] : []));
}

function piece(kind, name, cells, share) {
  const svg = s("svg", { viewBox: `0 0 ${cells.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${percent(share)} of the chunks` });
  [...cells].forEach((cell, place) => {
    const level = Number(cell);
    svg.append(s("rect", { class: level ? "cell" : "cell0", x: place + 0.06, y: 0, width: cells.length > 1 ? 0.88 : 1, height: 1, opacity: level ? 0.2 + (0.8 * level) / 9 : 1 }));
  });
  return h("div", { class: `piece ${kind}` }, h("span", { class: kind ? "" : "id" }, name), svg, h("span", { class: "share" }, `${Math.floor(100 * share)} %`));
}

function capacity(data) {
  $("capacity").hidden = !data;
  if (!data) return;
  const most = Math.max(data.staleness_bound_steps || 0, data.staleness_max_steps || 0, data.predicted_staleness_steps || 0, 1);
  const entries = [
    ["Learner waits", data.predicted_idle_ratio, data.idle_ratio, 1, null, percent],
    ["Staleness, worst (steps)", data.predicted_staleness_steps, data.staleness_max_steps, most, data.staleness_bound_steps, whole],
  ].filter(([, predicted, measured]) => !missing(predicted) || !missing(measured));
  const queued = data.queued_staleness_max_steps;
  const facts = [
    ["staleness, mean", data.staleness_mean_steps, (v) => `${fixed(v, 1)} steps`],
    ["bound S", data.staleness_bound_steps, (v) => `${number(v)} steps`],
    ["in workers' hands", data.in_flight_groups, (v) => plural(v, "group")],
    ["handed in, waiting", data.queued_groups, (v) => `${plural(v, "group")}${missing(queued) ? "" : `, the oldest ${number(queued)} steps`}`],
    ["a step takes", data.round_s, (v) => `${fixed(v, 1)} s`],
    ["learned, and lost by rounding", data.version_lag_ratio, percent],
  ].filter(([, value]) => !missing(value)).map(([name, value, write]) => [name, write(value)]);
  const list = h("dl", { class: "pairs" });
  pairs(list, facts);
  $("capacity-rows").replaceChildren(...entries.map((entry) => compared(...entry)), list);
}

function compared(name, predicted, measured, most, bound, write) {
  const row = (kind, value) => {
    const bar = h("div", { class: "fill", hidden: missing(value) });
    bar.style.width = `${Math.min(100, (100 * value) / most)}%`;
    const track = h("div", { class: "track", "aria-hidden": "true" }, bar);
    if (!missing(bound)) {
      const line = h("div", { class: "bound" });
      line.style.left = `${Math.min(100, (100 * bound) / most)}%`;
      track.append(line);
    }
    return h("div", { class: `row ${kind}` }, h("span", {}, kind), track, h("span", {}, write(value)));
  };
  return h("div", { class: "pair" }, h("span", {}, name), row("predicted", predicted), row("measured", measured));
}

function showWorkers(data, canAct) {
  $("workers").hidden = !data.rows.length && !canAct;
  $("act").hidden = !canAct;
  if (!data.rows.length) return;
  const rows = records(data);
  workers.show(rows, ROWS_SHOWN);
  const price = rows.reduce((sum, row) => sum + (row.price_per_h || 0), 0);
  const unseen = rows.length + data.left_out - ROWS_SHOWN;
  say($("workers-note"), `${plural(rows.length + data.left_out, "worker")}${price ? `, ${fixed(price, 2)} $/h listed` : ""}${unseen > 0 ? `, ${number(unseen)} not shown` : ""}`);
}

function showNodes() {
  const all = records(frame.nodes);
  const wanted = $("node-filter").value.trim().toLowerCase();
  const found = all.filter((row) => !wanted || [row.id, row.role, row.phase, row.agent, row.gone ? "gone" : "", ...row.alarms].some((text) => String(text).toLowerCase().includes(wanted)));
  const most = showAll || wanted ? 200 : ROWS_SHOWN;
  nodes.show(found, most);
  strip(all);
  const hidden = Math.max(0, found.length - most);
  const note = $("nodes-note");
  const text = [wanted ? `${plural(found.length, "node")} found` : "", hidden ? `${number(hidden)} more not shown` : "", frame.nodes.left_out ? `${number(frame.nodes.left_out)} more are not sent to this page` : ""].filter(Boolean).join("; ");
  if (note.dataset.text === text) return;
  note.dataset.text = text;
  note.replaceChildren(text);
  if (hidden && !showAll && !wanted) {
    const button = h("button", { type: "button" }, "Show up to 200");
    button.addEventListener("click", () => { showAll = true; showNodes(); });
    note.append(" ", button);
  }
}

function strip(rows) {
  const kinds = rows.map((row) => (row.gone ? "gone" : row.alarms.length ? "warn" : ""));
  const place = $("strip");
  place.hidden = rows.length < 8;
  const wanted = kinds.join();
  if (place.hidden || strip.drawn === wanted) return;
  strip.drawn = wanted;
  const count = (kind) => number(kinds.filter((each) => each === kind).length);
  place.setAttribute("aria-label", `${count("")} nodes are well, ${count("warn")} raise alarms, ${count("gone")} are gone`);
  place.replaceChildren(...kinds.map((kind) => h("i", { class: kind })));
}

function refused(state) {
  const named = (list, what) => list.map(([name, value]) => [`${printable(name).replaceAll("_", " ")}${what}`, value]);
  bars($("refused-list"), [...named(state.rejected, ""), ...named(state.discarded, ", by the learner")], whole, "refused", "Nothing was refused.");
}

function notes(list) {
  $("notes").hidden = !list.length;
  $("note-list").replaceChildren(...list.map(([peer, text]) => h("li", {}, h("span", { class: "id" }, short(peer)), " ", printable(text))));
}

function telemetry(state) {
  const heard = state.telemetry;
  pairs($("telemetry-list"), [
    ["reports come from", printable(state.source.name)],
    ["broker", state.source.connected === false ? "does not answer" : "answers"],
    ...Object.entries(heard).map(([name, value]) => [printable(name).replaceAll("_", " "), number(value)]),
    ["frame", `${number(state.number)}, made ${clock(state.unix_s)}`],
  ]);
}

for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    span = button.dataset.span;
    for (const each of document.querySelectorAll("[data-span]")) each.setAttribute("aria-pressed", String(each === button));
    if (frame) curves();
  });
}
$("act").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = event.submitter.dataset.act, depth = $("act-depth").value.trim();
  const wanted = name === "depth" ? { depth: depth ? Number(depth) : null } : { worker: $("act-worker").value.trim() };
  say($("act-said"), "asking");
  try {
    const answer = await fetch(`/api/actions/${name}`, { method: "POST", body: JSON.stringify(wanted), headers: { authorization: `Bearer ${$("act-token").value}` } });
    const told = await answer.json();
    say($("act-said"), printable(told.done ?? told.error));
  } catch {
    say($("act-said"), "the server does not answer");
  }
});
$("runs").addEventListener("change", () => { chosen = $("runs").value; onFrame(all); });
$("node-filter").addEventListener("input", () => frame && showNodes());
const kept = $("saved-state");
if (kept) onFrame(JSON.parse(kept.textContent));
else new Stream({ onFrame, onLost });
