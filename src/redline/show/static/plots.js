// What all charts share: axes, legend, fonts, colours, and how much one chart can hold before nobody can read it.

const MOST_SERIES = 16;
const MOST_BARS = 30;
const MOST_STARTS = 16;
const MOST_SINGLE_POINTS = 3;
const MOST_TWINS = 2;
const CONFIG = { displayModeBar: false, responsive: true };

function isNarrow() {
  return window.innerWidth < 640;
}
function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 8, font: { size: 12.5, color: colour("muted") } },
    gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"),
    tickfont: { size: 12, color: colour("muted") }, automargin: true, ...more,
  };
}
function batchAxis(rows) {
  const batches = distinct(rows.map((row) => row.batch)).sort((a, b) => a - b);
  const ticks = batches.length <= 12 ? batches : batches.filter((_, place) => place % Math.ceil(batches.length / 12) === 0);
  return axis("batch", { type: "log", tickvals: ticks, ticktext: ticks.map(String) });
}
function layout(more = {}) {
  const narrow = isNarrow();
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 350,
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 12.5, color: colour("ink") },
    margin: { l: 12, r: 14, t: 10, b: 44 }, hovermode: "closest", dragmode: narrow ? false : "zoom", bargap: 0.34,
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("muted"), align: "left", font: { size: 12.5, color: colour("ink"), family: "system-ui, sans-serif" } },
    showlegend: false,
    ...more,
  };
}

// Rows of horizontal bars: places on the axis, names as their labels, so that two equal names stay two bars.
function barAxis(labels) {
  return axis("", { tickvals: labels.map((_, place) => place), ticktext: labels.map((label) => inTwoLines(label, isNarrow() ? 20 : 44)), autorange: "reversed", showgrid: false, ticks: "", title: { text: "" } });
}
// Broken between two steps: what tells long recipes apart may be any of them.
function inTwoLines(label, most) {
  const line = oneLine(label);
  const place = line.lastIndexOf("+", most - 1) + 1;
  if ([...line].length <= most || !place) return plain(line, most);
  return `${plain(line.slice(0, place))}<br>${plain(line.slice(place), most)}`;
}
function barHeight(bars) {
  return Math.max(140, 34 * bars + 70);
}
// One subject at a time, the one with the most points first: lines of several models or tasks on one axis say little.
function pickSubject(section, rows, redraw) {
  const subjects = new Map();
  for (const row of rows) subjects.set(row.subject, [...(subjects.get(row.subject) ?? []), row]);
  if (subjects.size < 2) {
    pick(section, "subject", [], redraw);
    return rows;
  }
  const order = [...subjects].sort((one, other) => distinct(other[1].map((row) => `${row.recipe} ${row.batch}`)).length - distinct(one[1].map((row) => `${row.recipe} ${row.batch}`)).length);
  const picked = pick(section, "subject", [...order.map(([subject]) => [subject, subject]), ["*", `all ${subjects.size}`]], redraw);
  return picked === "*" ? rows : subjects.get(picked);
}

// Rows by what they ran, so that a card shows one workload at a time; those with the most to compare come first.
function byWorkload(rows, weight) {
  const workloads = new Map();
  for (const row of rows) {
    const key = `${row.subject}\u0000${row.batch}`;
    if (!workloads.has(key)) workloads.set(key, []);
    workloads.get(key).push(row);
  }
  return [...workloads].sort((one, other) => compareLists(weight(other[1]), weight(one[1])));
}
function pickWorkload(section, workloads, redraw) {
  const key = pick(section, "workload", workloads.slice(0, 300).map(([each, rows]) => [each, workloadName(rows[0])]), redraw);
  return workloads.find(([each]) => each === key)[1];
}
function compareLists(one, other) {
  for (let place = 0; place < one.length; place += 1) if (one[place] !== other[place]) return one[place] - other[place];
  return 0;
}

// Lines against the batch: the newest record of each batch, series by series.
function batchSeries(rows) {
  const series = new Map();
  for (const row of rows) {
    if (!known(row.batch)) continue;
    if (!series.has(row.series)) series.set(row.series, new Map());
    const points = series.get(row.series);
    const before = points.get(row.batch);
    if (!before || better(row, before)) points.set(row.batch, row);
  }
  const lines = [...series.values()].map((points) => [...points.values()].sort((a, b) => a.batch - b.batch));
  return lines.sort((a, b) => b.length - a.length);
}
function better(row, before) {
  const rank = (each) => [each.failure ? 0 : 1, each.kind === "run" ? 1 : 0, each.numerics === "not checked" ? 0 : 1, each.measured_at ?? ""];
  const [one, other] = [rank(row), rank(before)];
  for (let place = 0; place < one.length; place += 1) if (one[place] !== other[place]) return one[place] > other[place];
  return false;
}
function limited(list, most, what) {
  const left = list.length - most;
  return [list.slice(0, most), left > 0 ? `Showing ${most} of ${list.length} ${what}; the filters above narrow it down.` : ""];
}
// The legend is made of plain elements: it wraps on a phone and holds long names, which plotly's own does not.
const SHAPES = { circle: "M12 2a4 4 0 1 0 .01 0z", square: "M8 2h8v8h-8z", diamond: "M12 1l5 5l-5 5l-5-5z", "triangle-up": "M12 1l5 9h-10z", "triangle-down": "M12 11l5-9h-10z", cross: "M10 1h4v3h3v4h-3v3h-4v-3h-3v-4h3z", hexagon: "M12 1l5 3v4l-5 3l-5-3v-4z", pentagon: "M12 1l5 4l-2 6h-6l-2-6z", star: "M12 0l1.6 4h4.2l-3.4 2.6l1.3 4.2l-3.7-2.6l-3.7 2.6l1.3-4.2l-3.4-2.6h4.2z", x: "M8 1l4 4l4-4l1 1l-4 4l4 4l-1 1l-4-4l-4 4l-1-1l4-4l-4-4z" };
const DASHED = { solid: "", dash: "6 3", longdash: "9 3", dashdot: "6 2 2 2", dot: "2 3" };

function swatch(trace) {
  const make = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const first = (value) => (Array.isArray(value) ? value[0] : value);
  const drawn = make("svg", { viewBox: "0 0 24 12", "aria-hidden": "true" });
  const fill = first(trace.marker?.color) ?? trace.line?.color ?? colour("muted");
  if (trace.type === "bar") drawn.append(make("rect", { x: 6, y: 0.5, width: 12, height: 11, rx: 2, fill, opacity: first(trace.marker?.opacity) ?? 1 }));
  else {
    if (trace.mode.includes("lines")) drawn.append(make("line", { x1: 0, x2: 24, y1: 6, y2: 6, stroke: trace.line.color, "stroke-width": 2, "stroke-dasharray": DASHED[trace.line.dash ?? "solid"] ?? "" }));
    const symbol = String(first(trace.marker?.symbol) ?? "").replace("-open", "");
    if (trace.mode.includes("markers") && SHAPES[symbol]) drawn.append(make("path", { d: SHAPES[symbol], fill }));
  }
  return drawn;
}
function drawLegend(section, plot, traces) {
  const named = traces.map((trace, place) => ({ trace, place })).filter(({ trace }) => trace.label && trace.showlegend !== false);
  const buttons = named.length < 2 ? [] : named.map(({ trace, place }) => {
    const button = element("button", { type: "button", "aria-pressed": "true", title: trace.label });
    button.append(swatch(trace), element("span", {}, cut(trace.label, 64)));
    button.addEventListener("click", () => {
      const shows = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shows));
      const group = traces.map((other, at) => at).filter((at) => at === place || (trace.legendgroup && traces[at].legendgroup === trace.legendgroup));
      window.Plotly.restyle(plot, { visible: shows ? true : "legendonly" }, group);
    });
    return button;
  });
  section.querySelector(".legend").replaceChildren(...buttons);
}

function pick(section, name, options, changed) {
  // A choice inside a card; what was chosen stays chosen while it is there to be chosen.
  const holder = section.querySelector(".picker");
  let select = holder.querySelector(`select[data-pick="${name}"]`);
  if (!select) {
    select = element("select", { "data-pick": name, "aria-label": name });
    select.addEventListener("change", changed);
    holder.append(select);
  }
  const before = select.value;
  select.replaceChildren(...options.map(([value, label]) => Object.assign(element("option", {}, cut(label, 80)), { value })));
  select.hidden = options.length < 2;
  if (options.some(([value]) => value === before)) select.value = before;
  return select.value;
}
