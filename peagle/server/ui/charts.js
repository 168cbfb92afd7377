// Live charts: /metrics, read every second, drawn as SVG.

import { $, el, svg, tint } from "./dom.js";
import { acceptanceLength, snapshot } from "./metrics.js";

const KEPT = 121; // samples: two minutes
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [400, 158, 30, 18, 16];
const samples = [];

// `onState` gets whether the server answers.
export function startCharts(onState) {
  const charts = [
    new Lines("Throughput", "tokens / s", [["tokens / s", (now, before) => rate(now, before, "generated")]]),
    new Bars("Accepted, by depth in the draft"),
    new Lines("Rows and tokens of a target forward", "of one request", [
      ["rows", (now, before) => perForward(now, before, "rows")],
      ["tokens", (now, before) => perForward(now, before, "decoded")],
    ]),
    new Lines("Queue", "requests", [["running", (now) => now.running], ["waiting", (now) => now.waiting]]),
  ];
  $("charts").append(...charts.map((chart) => chart.node));
  const tick = async () => {
    if (!document.hidden) {
      try {
        const now = await snapshot();
        if (samples.length && restarted(now, samples.at(-1))) samples.length = 0;
        samples.push(now);
        if (samples.length > KEPT) samples.shift();
        for (const chart of charts) chart.draw(samples);
        onState(true);
      } catch {
        onState(false);
      }
    }
    setTimeout(tick, 1000);
  };
  tick();
}

const COUNTERS = ["generated", "rounds", "accepted", "forwards"];

const restarted = (now, before) => COUNTERS.some((name) => now[name] < before[name]);

const rate = (now, before, name) => (now[name] - before[name]) / (now.at - before.at);

function perForward(now, before, name) {
  const forwards = now.forwards - before.forwards;
  return forwards > 0 ? (now[name] - before[name]) / forwards : undefined;
}

class Chart {
  constructor(title, legend) {
    this.title = title;
    this.value = el("p", { class: "chart-value" }, "–");
    this.plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
    const head = el("div", { class: "chart-head" }, el("h3", {}, title), this.value);
    this.node = el("article", { class: "card chart" }, head, this.plot, legend);
  }

  y(value, top) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  }

  grid(top, label) {
    return [0, top / 2, top].flatMap((value) => {
      const y = this.y(value, top);
      const text = svg("text", { x: LEFT - 5, y: y + 3.5, "text-anchor": "end", class: "axis" }, label(value));
      return [svg("line", { x1: LEFT, x2: WIDTH, y1: y, y2: y, class: "grid" }), text];
    });
  }
}

class Lines extends Chart {
  constructor(title, unit, series) {
    const names = series.map(([name], index) => el("li", {}, el("span", { class: `key s${index}` }), name));
    super(title, el("ul", { class: "keys" }, ...names));
    [this.unit, this.series] = [unit, series];
  }

  draw(kept) {
    const rows = this.series.map(([, read]) =>
      kept.map((now, at) => (at ? read(now, kept[at - 1]) : undefined)));
    const values = rows.flat().filter((value) => value !== undefined);
    const top = ceiling(Math.max(0, ...values));
    const x = (at) => WIDTH - ((kept.length - 1 - at) * (WIDTH - LEFT)) / (KEPT - 1);
    const lines = rows.flatMap((row, index) => {
      const points = row.flatMap((value, at) => (value === undefined ? [] : [[x(at), this.y(value, top)]]));
      const d = points.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}${at ? "" : "h0"}`).join("");
      const line = svg("path", { d, class: `line s${index}` });
      if (rows.length > 1 || !points.length) return [line];
      return [svg("path", { d: `${d}V${HEIGHT - BOTTOM}H${points[0][0].toFixed(1)}Z`, class: "area" }), line];
    });
    this.plot.replaceChildren(...this.grid(top, String), ...times(), ...lines);
    const latest = rows.map((row) => row.findLast((value) => value !== undefined));
    const shown = latest.map((value) => (value === undefined ? "–" : short(value)));
    this.value.textContent = shown.join(" / ");
    const label = this.series.map(([name], index) => `${name} ${shown[index]}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}, ${this.unit}: ${label}; at most ${short(Math.max(0, ...values))}`);
    this.node.dataset.most = Math.max(0, ...values);
  }
}

class Bars extends Chart {
  constructor(title) {
    super(title, el("p", { class: "keys" }, "share of rounds with a draft"));
  }

  draw(kept) {
    const now = kept.at(-1);
    // Of what was kept, or where nothing was drafted meanwhile, of all.
    const before = now.rounds > kept[0].rounds ? kept[0] : { rounds: 0, positions: [], accepted: 0 };
    const rounds = now.rounds - before.rounds;
    const drafted = rounds ? now.positions : [];
    const shares = Array.from(drafted, (count, at) => ((count ?? 0) - (before.positions[at] ?? 0)) / rounds);
    const step = (WIDTH - LEFT) / Math.max(4, shares.length);
    const bars = shares.flatMap((share, at) => {
      const [x, y] = [LEFT + step * (at + 0.5), this.y(share, 1)];
      const bar = { x: x - step * 0.32, y, width: step * 0.64, height: HEIGHT - BOTTOM - y, rx: 3 };
      const percent = `${Math.round(share * 100)} %`;
      return [
        svg("rect", { ...bar, class: `bar ${tint(at + 1)}` }),
        svg("text", { x, y: HEIGHT - 5, "text-anchor": "middle", class: "axis" }, String(at + 1)),
        svg("text", { x, y: y - 4, "text-anchor": "middle", class: "axis strong" }, percent),
      ];
    });
    this.plot.replaceChildren(...this.grid(1, (value) => `${value * 100}`), ...bars);
    const length = acceptanceLength(before, now);
    this.value.textContent = length === undefined ? "–" : `AL ${length.toFixed(2)}`;
    const label = shares.map((share, at) => `depth ${at + 1} ${Math.round(share * 100)} %`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${label || "nothing was drafted"}`);
    this.node.dataset.most = Math.max(0, ...shares);
  }
}

function times() {
  return [["2 min ago", LEFT, "start"], ["now", WIDTH, "end"]].map(([text, x, anchor]) =>
    svg("text", { x, y: HEIGHT - 4, "text-anchor": anchor, class: "axis" }, text));
}

// The next of 2, 4, 10, 20, 40, 100 …: half of it is a round number, too.
function ceiling(value) {
  for (let unit = 1; ; unit *= 10) {
    for (const step of [2, 4, 10]) if (value <= step * unit) return step * unit;
  }
}

const short = (value) => (Number.isInteger(value) || value >= 100 ? String(Math.round(value)) : value.toFixed(value < 10 ? 2 : 1));
