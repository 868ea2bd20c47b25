// Tables that are changed in place, so that the focus and the scroll stay where they are.

import { DASH, h, say } from "./format.js";

export const ROWS_SHOWN = 25;

export class Table {
  // columns: [{name, key, write, text}]; the first one opens a row's detail: row -> [[name, value]]
  constructor(table, columns, { identity, classes = () => "", detail = null }) {
    Object.assign(this, { columns, identity, classes, detail });
    this.by = null; this.down = false; this.rows = new Map(); this.open = new Set();
    this.heads = columns.map((column, place) => {
      const button = h("button", { type: "button", title: column.title }, column.name);
      button.addEventListener("click", () => this.sort(place));
      return h("th", { scope: "col", class: column.text ? "text" : null }, button);
    });
    this.body = h("tbody");
    table.append(h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    this.data = [];
  }

  sort(place) {
    this.down = this.by === place ? !this.down : !this.columns[place].text && place !== 0;
    this.by = place;
    this.show(this.data, this.most);
  }

  show(data, most = Infinity) {
    this.data = data; this.most = most;
    this.heads.forEach((head, place) => {
      if (place === this.by) head.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const ordered = this.by === null ? data : [...data].sort((a, b) => this.compare(a, b));
    const wanted = [];
    const known = new Map();
    for (const record of ordered.slice(0, most)) {
      const id = this.identity(record);
      const row = this.rows.get(id) || this.make(id);
      known.set(id, row);
      this.update(row, record);
      wanted.push(row.element);
      if (this.detail && this.open.has(id)) wanted.push(this.opened(row, record));
    }
    this.rows = known;
    for (const id of this.open) if (!known.has(id)) this.open.delete(id);
    wanted.forEach((element, place) => { if (this.body.children[place] !== element) this.body.insertBefore(element, this.body.children[place] || null); });
    while (this.body.children.length > wanted.length) this.body.lastChild.remove();
  }

  compare(a, b) {
    const { key } = this.columns[this.by];
    const [x, y] = [a, b].map((record) => record[key]);
    if (x === y) return this.identity(a) < this.identity(b) ? -1 : 1;
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return (x < y ? -1 : 1) * (this.down ? -1 : 1);
  }

  make(id) {
    const cells = this.columns.map((column, place) => {
      const cell = h("td", { class: column.text ? "text" : null });
      if (place === 0 && this.detail) {
        const button = h("button", { type: "button", class: "id", "aria-expanded": "false" });
        button.addEventListener("click", () => this.toggle(id, button));
        cell.append(h("span", { class: "mark-dot", "aria-hidden": "true" }), button);
        return { cell, inner: button };
      }
      return { cell, inner: cell };
    });
    return { element: h("tr", {}, ...cells.map((each) => each.cell)), cells, id };
  }

  toggle(id, button) {
    if (!this.open.delete(id)) this.open.add(id);
    button.setAttribute("aria-expanded", String(this.open.has(id)));
    this.show(this.data, this.most);
  }

  update(row, record) {
    const kind = this.classes(record);
    if (row.element.className !== kind) row.element.className = kind;
    this.columns.forEach((column, place) => {
      say(row.cells[place].inner, column.write ? column.write(record[column.key], record) : record[column.key] ?? DASH);
    });
  }

  opened(row, record) {
    if (!row.more) {
      row.list = h("dl", { class: "pairs" });
      row.more = h("tr", { class: "detail" }, h("td", { colspan: this.columns.length }, row.list));
    }
    pairs(row.list, this.detail(record));
    return row.more;
  }
}

// Names and values of a description list, changed in place.
export function pairs(list, entries) {
  while (list.children.length > 2 * entries.length) list.lastChild.remove();
  entries.forEach(([name, value], place) => {
    if (!list.children[2 * place]) list.append(h("dt"), h("dd"));
    say(list.children[2 * place], name);
    say(list.children[2 * place + 1], value);
  });
}

// A list of names with a bar each.
export function bars(list, entries, write, kind = "", none = "None.") {
  const most = Math.max(...entries.map((entry) => entry[1]), 0);
  list.replaceChildren(...(entries.length ? entries.map(([name, value, told]) => {
    const bar = h("div", { class: `fill ${kind}` });
    bar.style.width = `${most ? (100 * value) / most : 0}%`;
    return h("li", {}, h("span", { class: "name", title: name }, name), h("span", {}, told ?? write(value)), h("div", { class: "track", "aria-hidden": "true" }, bar));
  }) : [h("li", { class: "soft" }, none)]));
}
