// Elements, lists and tables that are brought up to date in place, so that focus and selection stay. All text is set as text.

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// The children of `parent` are those of `items`, in their order: made once for each key, updated each time.
export function keyed(parent, items, key, make, update) {
  const known = parent.known ?? (parent.known = new Map());
  const wanted = new Set(items.map(key));
  for (const [name, child] of known) {
    if (!wanted.has(name)) {
      child.remove();
      known.delete(name);
    }
  }
  let place = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    let child = known.get(name);
    if (!child) known.set(name, (child = make(item)));
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
}

// Columns: {title, of(row) -> text, number: aligned right, header: names the row, draw(cell, row): more than its text}.
export function table(caption, columns) {
  const head = el("tr", {}, ...columns.map((column) => el("th", { scope: "col", class: column.number ? "number" : "" }, column.title)));
  const body = el("tbody");
  const whole = el("table", {}, el("caption", {}, caption), el("thead", {}, head), body);
  const cell = (column) =>
    column.header ? el("th", { scope: "row" }) : el("td", { class: column.number ? "number" : "" });
  whole.fill = (rows, key) =>
    keyed(body, rows, key, () => el("tr", {}, ...columns.map(cell)), (line, row) => {
      columns.forEach((column, i) => {
        if (column.draw) column.draw(line.cells[i], row);
        else text(line.cells[i], column.of(row));
      });
    });
  return whole;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  while (Math.abs(count) >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count >= 100 || unit === 0 || Number.isInteger(count) ? count.toFixed(0) : count.toFixed(1)} ${UNITS[unit]}`;
}

export function counted(count, what) {
  return `${count} ${what}${count === 1 ? "" : "s"}`;
}

export function seconds(count, digits = 2) {
  if (count === null || count === undefined) return "–";
  const size = Math.abs(count);
  if (size < 10) return `${count.toFixed(digits)} s`;
  if (size < 120) return `${count.toFixed(0)} s`;
  return size < 7200 ? `${(count / 60).toFixed(0)} min` : `${(count / 3600).toFixed(1)} h`;
}

// A model's colour: far from those of its neighbours in the list of all.
export function hues(models) {
  return new Map(models.map((model, i) => [model.model, Math.round((250 + i * 137.508) % 360)]));
}
