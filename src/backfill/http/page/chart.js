// A chart of the last two minutes as SVG: stacked areas or curves, and an objective.

const NS = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM] = [300, 120, 40, 8, 14];
const SPAN_S = 120;

function svg(kind, attributes, parent) {
  const element = document.createElementNS(NS, kind);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  parent?.append(element);
  return element;
}

export function html(kind, properties = {}, ...children) {
  const element = Object.assign(document.createElement(kind), properties);
  element.append(...children);
  return element;
}

/** A count and its noun. */
export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

export class Chart {
  /**
   * @param parent element that gets the chart.
   * @param title of the chart, with its unit.
   * @param series `[name, colour class]` each, from the bottom up where they are stacked.
   * @param stacked areas on one another instead of curves.
   * @param most upper end of the scale; by default what the values need.
   * @param format a value as text; `axis` one on the scale.
   */
  constructor(parent, title, series, { stacked = false, most = null, format, axis = format }) {
    Object.assign(this, { title, series, stacked, most, format, axis, points: [], objective: null });
    this.figure = html("p", { className: "figure" });
    this.image = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    const legend = html("p", { className: "legend" });
    for (const [name, colour] of series) legend.append(html("span", { className: colour, textContent: name }));
    parent.append(html("div", { className: "chart" }, html("h3", { textContent: title }), this.figure, this.image, legend));
  }

  /** Add the values at an instant, in seconds; null where one is unknown. */
  add(at, values, { objective = null, figure = "" } = {}) {
    this.points.push({ at, values });
    this.points = this.points.filter((point) => point.at > at - SPAN_S);
    this.objective = objective;
    this.figure.textContent = figure;
    this.draw(at);
  }

  draw(now) {
    const top = this.most ?? niceAbove(Math.max(this.largest(), this.objective ?? 0));
    const x = (at) => WIDTH - ((now - at) / SPAN_S) * (WIDTH - LEFT);
    const y = (value) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - Math.min(value / top, 1));
    this.image.replaceChildren();
    const known = this.series.map(([name], index) => [name, this.points.at(-1)?.values[index]]);
    const words = known.map(([name, value]) => `${name} ${value == null ? "unknown" : this.format(value)}`);
    this.image.setAttribute("aria-label", `${this.title}: ${words.join(", ")}`);
    for (const value of [0, top / 2, top]) {
      svg("line", { x1: LEFT, x2: WIDTH, y1: y(value), y2: y(value), class: "axis" }, this.image);
      svg("text", { x: LEFT - 3, y: y(value) + 3, "text-anchor": "end" }, this.image).textContent = this.axis(value);
    }
    svg("text", { x: LEFT, y: HEIGHT - 1 }, this.image).textContent = "-2 min";
    svg("text", { x: WIDTH, y: HEIGHT - 1, "text-anchor": "end" }, this.image).textContent = "now";
    for (const [index, [, colour]] of [...this.series.entries()].reverse()) {
      for (const run of this.runs(index)) {
        const upper = run.map(({ at, value }) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
        const lower = run.map(({ at, base }) => `${x(at).toFixed(1)},${y(base).toFixed(1)}`).reverse();
        const d = `M${(this.stacked ? [...upper, ...lower] : upper).join("L")}`;
        svg("path", { d: this.stacked ? `${d}Z` : d, class: `${this.stacked ? "area" : "curve"} ${colour}` }, this.image);
      }
    }
    if (this.objective !== null) {
      svg("path", { d: `M${LEFT},${y(this.objective)}H${WIDTH}`, class: "objective" }, this.image);
    }
  }

  largest() {
    const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
    return Math.max(0, ...this.points.map(({ values }) => (this.stacked ? sum(values) : Math.max(0, ...values))));
  }

  /** Stretches of a series without unknown values. */
  runs(index) {
    const runs = [[]];
    for (const { at, values } of this.points) {
      const value = values[index];
      if (value === null) {
        if (runs.at(-1).length) runs.push([]);
        continue;
      }
      const base = this.stacked ? values.slice(0, index).reduce((total, each) => total + (each ?? 0), 0) : 0;
      runs.at(-1).push({ at, base, value: base + value });
    }
    return runs.filter((run) => run.length > 1);
  }
}

/** The next of 1, 2, 5, 10, ... */
function niceAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((each) => each * power >= value);
}
