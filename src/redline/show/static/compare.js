// Before and after: two rows of the table beside each other. What was measured interleaved has an interval; nothing else gets one.

const compared = [];
const MOST_KERNELS = 25;

function toggleCompared(id) {
  const place = compared.indexOf(id);
  if (place >= 0) compared.splice(place, 1);
  else if (id !== null) compared.push(id);
  if (compared.length > 2) compared.shift();
  keepState();
  drawTable(shownRows());
  drawComparison();
}

function drawComparison() {
  const section = document.getElementById("compare");
  if (!section) return;
  const rows = compared.map((id) => ROWS.find((row) => row.record_id === id)).filter(Boolean);
  section.hidden = rows.length < 2;
  tellPicked(rows);
  if (rows.length < 2) return;
  // The older one, or what the other was set against, comes first.
  const [a, b] = rows[0].compared_with === rows[1].recipe && rows[0].subject === rows[1].subject ? [rows[1], rows[0]] : rows;
  const parts = [comparedNames(a, b), element("p", { class: "told" }, comparison(a, b)), ...decideLine(a, b), ...whyLines(a, b), comparedTable(a, b)];
  section.querySelector(".body").replaceChildren(...parts);
  drawBoth(section, a, b);
  section.querySelector(".kernels").replaceChildren(...kernelParts(a, b));
}

function tellPicked(rows) {
  const told = document.getElementById("picked");
  told.hidden = rows.length !== 1;
  if (rows.length === 1) told.textContent = `${rows[0].recipe} is picked: tick another row to set the two beside each other.`;
}

function comparedNames(a, b) {
  const list = element("dl");
  for (const [label, row] of [["A, before", a], ["B, after", b]]) list.append(element("dt", {}, label), element("dd", {}, `${oneLine(row.recipe)} · ${oneLine(workloadName(row))}`));
  return list;
}

function comparison(a, b) {
  const alike = a.subject === b.subject && a.batch === b.batch;
  const [name, other] = [oneLine(b.recipe), oneLine(a.recipe)];
  if (alike && known(b.ratio_low) && b.compared_with === a.recipe) {
    const words = { faster: "faster than A", slower: "slower than A", same: "as fast as A" }[b.verdict] ?? "not decided against A";
    const doubt = a.trusted && b.trusted ? "" : "; the numbers are doubted, see trust below";
    return `B is ${words}: ${name} runs at ${b.shown.ratio} the speed of ${other}, measured interleaved${doubt}.`;
  }
  if (!known(a.throughput) || !known(b.throughput)) return "One of them has no speed, so there is nothing to compare.";
  const apart = alike ? "they were not measured interleaved" : "they are different workloads";
  const doubt = a.trusted && b.trusted ? "" : "; the numbers are doubted, see trust below";
  return `B runs at ${figure((b.sustained ?? b.throughput) / (a.sustained ?? a.throughput))}× the speed of A, without an interval: ${apart}${doubt}.`;
}

// What would decide it: measuring both interleaved.
function decideLine(a, b) {
  const alike = a.subject === b.subject && a.batch === b.batch;
  if (!alike || !b.command || !known(a.throughput) || !known(b.throughput) || (known(b.ratio_low) && b.compared_with === a.recipe)) return [];
  const command = `${b.command.replace(/ -r .*/, "")} --decide -r ${a.recipe} -r ${b.recipe}`;
  const line = element("p", { class: "hint" }, "What decides it: ");
  line.append(element("code", {}, command), " ", element("button", { type: "button", class: "copy", "data-copy": command }, "Copy command"));
  return [line];
}

const profileOf = (row) => PAYLOAD.profiles.filter((each) => each.row === row.number || (ROWS[each.row].subject === row.subject && ROWS[each.row].recipe === row.recipe && ROWS[each.row].batch === row.batch)).at(-1);

function whyLines(a, b) {
  const lines = [];
  if (a.bound !== b.bound) lines.push(`The limit moved from ${a.bound} to ${b.bound}: ${b.bound_evidence ?? ""}`);
  const [before, after] = [profileOf(a), profileOf(b)];
  if (before && after && before !== after) {
    const gone = before.findings.filter((code) => !after.findings.includes(code));
    const fresh = after.findings.filter((code) => !before.findings.includes(code));
    if (gone.length) lines.push(`No longer in the way: ${gone.join(", ")}`);
    if (fresh.length) lines.push(`New in the way: ${fresh.join(", ")}`);
    const each = (profile, name) => (profile.classes.find((one) => one.name === name)?.total_s ?? 0) / (profile.steps || 1);
    const changes = distinct([...before.classes, ...after.classes].map((one) => one.name)).map((name) => [name, each(before, name), each(after, name)]).sort((one, other) => Math.abs(other[2] - other[1]) - Math.abs(one[2] - one[1]));
    const told = changes.slice(0, 3).filter(([, was, is]) => was !== is).map(([name, was, is]) => `${name} ${seconds(was)} → ${seconds(is)}`);
    if (told.length) lines.push(`By class, per step: ${told.join("; ")}`);
  }
  return lines.map((line) => element("p", { class: "hint" }, oneLine(line)));
}

function comparedTable(a, b) {
  const table = element("table");
  const head = element("tr");
  for (const text of ["", "A", "B", "B/A"]) head.append(element("th", { scope: "col" }, text));
  table.append(head);
  const figures = [
    ["speed", "throughput"], ["sustained", "sustained"], ["±", "half_width", true], ["p50", "latency_p50"], ["p95", "latency_p95"], ["p99", "latency_p99"],
    ["memory", "memory"], ["energy per item", "energy_per_item"], ["of the roofline left", "headroom", true], ["rel. error", "rel_error", true],
  ];
  for (const [label, name, plainly] of figures) {
    if (![a, b].some((row) => row.shown[name])) continue;
    const line = element("tr");
    line.append(element("th", { scope: "row", class: "text" }, label));
    for (const row of [a, b]) line.append(element("td", {}, (name === "throughput" ? speedText(row) : row.shown[name]) ?? "–"));
    line.append(element("td", {}, !plainly && a[name] && known(b[name]) ? `${figure(b[name] / a[name])}×` : ""));
    table.append(line);
  }
  for (const [label, value] of [["bound", (row) => row.bound], ["trust", (row) => row.trust ?? ""], ["setting", (row) => row.setting], ["device", (row) => row.device]]) {
    // Where they ran is only worth a line where that differs.
    if (["setting", "device"].includes(label) && value(a) === value(b)) continue;
    const line = element("tr");
    line.append(element("th", { scope: "row", class: "text" }, label), element("td", {}, oneLine(value(a) ?? "–")), element("td", {}, oneLine(value(b) ?? "–")), element("td"));
    table.append(line);
  }
  const holder = element("div", { class: "scroll", tabindex: "0" });
  holder.append(table);
  return holder;
}

function drawBoth(section, a, b) {
  const plot = section.querySelector(".plot");
  const samples = [a, b].map((row) => PAYLOAD.distributions.filter((each) => each.row === row.number).at(-1));
  plot.hidden = !samples.every(Boolean);
  if (plot.hidden || !libraryReady) return;
  const traces = samples.map((each, place) => {
    const shares = each.s.map((_, at) => (each.s.length > 1 ? (100 * at) / (each.s.length - 1) : 50));
    return { type: "scatter", mode: each.s.length > 1 ? "lines" : "markers", x: each.s.map((value) => value * 1e3), y: shares, name: ["A", "B"][place], line: { color: place ? paletteColour(0) : colour("muted"), width: 2.6 }, hoverinfo: "text", hovertext: each.s.map((value, at) => `${["A", "B"][place]}: ${figure(shares[at])} % of ${each.n} steps within ${seconds(value)}`) };
  });
  window.Plotly.react(plot, traces, layout({ height: 280, showlegend: true, legend: { orientation: "h", y: 1.12 }, xaxis: logWhenWide(axis("ms per step"), samples.flatMap((each) => each.s.map((value) => value * 1e3))), yaxis: axis("% of steps", { range: [0, 101] }) }), CONFIG);
}

function kernelParts(a, b) {
  const [before, after] = [profileOf(a), profileOf(b)];
  if (!before || !after || before === after) return [element("p", { class: "hint" }, "Kernel by kernel needs a profile of both: redline profile MODEL -r RECIPE.")];
  const times = new Map();
  for (const [place, profile] of [before, after].entries()) {
    for (const kernel of profile.kernels) {
      // Two kernels may share a short name: they are added up, so that none vanishes and appears at once.
      const entry = times.get(kernel.name) ?? [0, 0];
      entry[place] += kernel.total_s / (profile.steps || 1);
      times.set(kernel.name, entry);
    }
  }
  const changes = [...times].map(([name, [was, is]]) => ({ name, was, is })).sort((one, other) => Math.abs(other.is - other.was) - Math.abs(one.is - one.was)).slice(0, MOST_KERNELS);
  const table = element("table");
  const head = element("tr");
  for (const text of ["kernel, per step", "A", "B", "change"]) head.append(element("th", { scope: "col", ...(text.startsWith("kernel") ? { class: "text" } : {}) }, text));
  table.append(head);
  for (const { name, was, is } of changes) {
    const line = element("tr");
    line.append(element("td", { class: "text wide", title: oneLine(name) }, cut(name, 70)), element("td", {}, was ? seconds(was) : "–"), element("td", {}, is ? seconds(is) : "–"), element("td", { class: is < was ? "faster" : "slower" }, was && is ? `${is < was ? "−" : "+"}${seconds(Math.abs(is - was))}` : was ? "gone" : "new"));
    table.append(line);
  }
  const holder = element("div", { class: "scroll", tabindex: "0" });
  holder.append(table);
  return [element("h3", {}, "Kernel by kernel"), element("p", { class: "hint" }, `The ${MOST_KERNELS} largest changes among the longest kernels of both; times under the profiler, per step.`), holder];
}
