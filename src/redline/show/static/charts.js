// One function per chart: from the rows that the filters leave to plotly's traces, or null where nothing is left.

const CHARTS = {
  recipes(rows, section, redraw) {
    const measured = rows.filter((row) => known(row.throughput));
    if (!measured.length) return null;
    // Rows measured in turns first, then the most recipes, then the largest batch.
    const weight = (list) => [list.some((row) => known(row.ratio_low)) ? 1 : 0, distinct(list.map((row) => row.recipe)).length, list[0].batch ?? 0];
    const together = pickWorkload(section, byWorkload(measured, weight), redraw);
    // An ablation sets its recipes against the winner; one picture has one measure.
    const firsts = together.filter((row) => known(row.ratio)).map((row) => row.compared_with);
    const usual = firsts.includes("baseline") ? "baseline" : mostCommon(firsts);
    const tellsRatio = (row) => row.shown.ratio && row.compared_with === usual;
    const newest = new Map();
    for (const row of together) if (!newest.has(row.recipe) || better(row, newest.get(row.recipe))) newest.set(row.recipe, row);
    const [bars, remark] = limited([...newest.values()].sort((a, b) => b.throughput - a.throughput), MOST_BARS, "recipes");
    const item = bars[0].item || "items";
    const bar = {
      type: "bar", orientation: "h", x: bars.map((row) => row.throughput), y: bars.map((_, place) => place),
      error_x: {
        type: "data", symmetric: false, color: colour("ink"), thickness: 1.4, width: 5,
        array: bars.map((row) => (known(row.throughput_high) ? row.throughput_high - row.throughput : 0)),
        arrayminus: bars.map((row) => (known(row.throughput_low) ? row.throughput - row.throughput_low : 0)),
      },
      marker: {
        color: bars.map((row) => style(row).colour), opacity: bars.map((row) => (row.trusted && row.sound ? 1 : 0.75)),
        pattern: { shape: bars.map((row) => (row.trusted && row.sound ? "" : "/")), fgcolor: colour("card"), size: 7, solidity: 0.28 },
      },
      hoverinfo: "text", hovertext: bars.map(rowTold), textposition: "none",
    };
    const widest = Math.max(...bars.map((row) => row.throughput_high ?? row.throughput));
    const labels = {
      type: "scatter", mode: "text", x: bars.map((row) => Math.max(row.throughput_high ?? 0, row.throughput) + widest * 0.012), y: bars.map((_, place) => place),
      text: bars.map((row) => barText(row, tellsRatio(row))), textposition: "middle right", hoverinfo: "skip", showlegend: false, cliponaxis: false, textfont: { size: 12, color: colour("ink") },
    };
    const range = [0, widest * (isNarrow() ? 2.3 : 1.38)];
    return {
      traces: [bar, labels], remark,
      layout: layout({ height: barHeight(bars.length), showlegend: false, xaxis: axis(`${plain(item)} per second${usual ? `; × against ${plain(usual, 40)}` : ""}`, { range }), yaxis: barAxis(bars.map((row) => row.recipe)) }),
    };
  },

  throughput(rows, section, redraw) {
    const drawn = againstBatch(section, rows, redraw, (row) => row.throughput, {
      error: (row) => (known(row.throughput_low) ? [row.throughput_high - row.throughput, row.throughput - row.throughput_low] : [0, 0]),
    });
    if (!drawn) return null;
    const shown = new Map(drawn.lines.map((line) => [line[0].series, line]));
    const knees = (LINES.knees ?? []).filter((knee) => shown.has(`${knee.subject}\u0000${knee.recipe}`));
    if (knees.length) {
      drawn.traces.push({
        type: "scatter", mode: "markers", label: "knee", meta: "guide", x: knees.map((knee) => knee.knee_batch), y: knees.map((knee) => knee.throughput),
        marker: { symbol: "star", size: 16, color: knees.map((knee) => style(shown.get(`${knee.subject}\u0000${knee.recipe}`)[0]).colour), line: { width: 1.5, color: colour("ink") } },
        hoverinfo: "text", hovertext: knees.map((knee) => `<b>knee at batch ${knee.knee_batch}</b><br>${plain(knee.recipe, 70)}<br>${Math.round(100 * knee.of_limit)} % of the ${figure(knee.limit, 5)} per second that larger batches near`),
      });
    }
    const items = distinct(drawn.lines.map((line) => line[0].item || "items"));
    return { ...drawn, layout: layout({ height: 330, xaxis: batchAxis(drawn.lines.flat()), yaxis: axis(`${plain(items.join(", "))} per second`, { rangemode: "tozero" }) }) };
  },

  latency(rows, section, redraw) {
    const drawn = againstBatch(section, rows, redraw, (row) => (known(row.latency_p50) ? row.latency_p50 * 1e3 : null), {
      error: (row) => (known(row.latency_p50_low) ? [(row.latency_p50_high - row.latency_p50) * 1e3, (row.latency_p50 - row.latency_p50_low) * 1e3] : [0, 0]),
    });
    if (!drawn) return null;
    for (const line of drawn.lines) {
      const tails = line.filter((row) => known(row.latency_p95));
      if (!tails.length) continue;
      const look = style(line[0]);
      drawn.traces.push({
        type: "scatter", mode: tails.length > 1 ? "lines" : "markers", legendgroup: line[0].series, showlegend: false,
        x: tails.map((row) => row.batch), y: tails.map((row) => row.latency_p95 * 1e3), line: { color: look.colour, dash: "dot", width: 1.6 },
        marker: { color: look.colour, symbol: "line-ew-open", size: 9 }, hoverinfo: "text", hovertext: tails.map((row) => `p95 ${row.shown.latency_p95}<br>${rowTold(row)}`),
      });
    }
    return { ...drawn, layout: layout({ height: 330, xaxis: batchAxis(drawn.lines.flat()), yaxis: logWhenWide(axis("ms per step"), drawn.lines.flat().map((row) => row.latency_p50 * 1e3)) }) };
  },

  memory(rows, section, redraw) {
    const drawn = againstBatch(section, rows, redraw, (row) => (known(row.memory) ? row.memory / 2 ** 30 : null), {});
    if (!drawn) return null;
    const subjects = new Set(drawn.lines.map((line) => line[0].subject));
    const broken = rows.filter((row) => (row.failure ?? "").startsWith("oom") && known(row.batch) && subjects.has(row.subject));
    if (broken.length) {
      const top = Math.max(...drawn.lines.flat().map((row) => row.memory)) / 2 ** 30;
      drawn.traces.push({
        type: "scatter", mode: "markers", label: "out of memory", x: broken.map((row) => row.batch), y: broken.map(() => top * 1.06),
        marker: { symbol: "x", size: 11, color: colour("bad") }, hoverinfo: "text", hovertext: broken.map(rowTold),
      });
    }
    return { ...drawn, layout: layout({ height: 330, xaxis: batchAxis([...drawn.lines.flat(), ...broken]), yaxis: axis("GiB", { rangemode: "tozero" }) }) };
  },

  distribution(rows, section, redraw) {
    const shown = new Set(rows.map((row) => row.number));
    const kept = new Map(PAYLOAD.distributions.filter((each) => shown.has(each.row)).map((each) => [each.row, { ...each, about: ROWS[each.row] }]));
    if (!kept.size) return null;
    const workloads = byWorkload([...kept.keys()].map((number) => ROWS[number]), (list) => [list.length, list[0].batch ?? 0]);
    const together = pickWorkload(section, workloads, redraw).map((row) => kept.get(row.number));
    const [lines, remark] = limited(newestOfEach(together.reverse(), (each) => each.about.series, MOST_TWINS), MOST_SERIES, "records");
    const name = namer(lines.map((each) => each.about));
    const traces = lines.map((each, place) => {
      const look = style(each.about);
      const shares = each.s.map((_, at) => (each.s.length > 1 ? (100 * at) / (each.s.length - 1) : 50));
      const twin = lines.findIndex((other) => other.about.series === each.about.series) !== place;
      return {
        type: "scatter", mode: each.s.length > 1 ? "lines" : "markers", label: name(each.about), x: each.s.map((value) => value * 1e3), y: shares,
        line: { color: look.colour, width: 2.2, dash: twin ? "dash" : look.dash }, opacity: twin ? 0.6 : 1,
        hoverinfo: "text", hovertext: each.s.map((value, at) => `<b>${plain(each.about.recipe, 60)}</b><br>${figure(shares[at])} % of ${each.n} steps within ${seconds(value)}<br>trust: ${plain(each.about.trust ?? "")}`),
      };
    });
    const guides = [50, 95, 99].map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: colour("muted"), width: 1, dash: "dot" } }));
    const values = lines.flatMap((each) => each.s);
    return { traces, remark, layout: layout({ height: 330, shapes: guides, xaxis: logWhenWide(axis("ms per step"), values), yaxis: axis("% of steps", { range: [0, 101], tickvals: [0, 25, 50, 75, 95], zeroline: false }) }) };
  },

  cold(rows) {
    const parts = [["start_time", "worker"], ["build_time", "build"], ["rest_s", "first call"], ["compile_time", "compiling"]];
    const started = rows.filter((row) => known(row.first_call_time) || known(row.build_time)).map((row) => ({ ...row, rest_s: known(row.first_call_time) ? Math.max(0, row.first_call_time - (row.compile_time ?? 0)) : null }));
    if (!started.length) return null;
    const newest = new Map();
    for (const row of started) {
      const key = `${row.subject}\u0000${row.recipe}`;
      const before = newest.get(key);
      if (!before || (row.compile_time ?? 0) > (before.compile_time ?? 0)) newest.set(key, row);
    }
    const whole = (row) => parts.reduce((sum, [name]) => sum + (row[name] ?? 0), 0);
    const [bars, remark] = limited([...newest.values()].sort((a, b) => whole(b) - whole(a)), MOST_STARTS, "recipes");
    const traces = stacked(bars, parts.map(([name, label], place) => ({ label, colour: paletteColour([5, 0, 4, 1][place]), value: (row) => row[name], told: (row) => `${label}: ${seconds(row[name])}${name === "compile_time" && row.compile_cache ? ` (cache ${plain(row.compile_cache)})` : ""}<br>in all ${seconds(whole(row))}<br>importing torch, apart: ${seconds(row.import_time)}<br>trust: ${plain(row.trust ?? "")}` })));
    const labels = bars.map(namer(bars)).map((label, at) => `${label}${known(bars[at].batch) ? ` · b${bars[at].batch}` : ""}`);
    return { traces, remark, layout: layout({ barmode: "stack", height: barHeight(bars.length), xaxis: axis("seconds", { rangemode: "tozero" }), yaxis: barAxis(labels) }) };
  },

  phases(rows, section, redraw) {
    const parts = [["data", "data"], ["forward", "forward"], ["backward", "backward"], ["optimizer_step", "optimizer"]];
    const newest = new Map();
    for (const row of rows.filter((each) => known(each.forward))) {
      const key = `${row.series}\u0000${row.batch}`;
      if (!newest.has(key) || better(row, newest.get(key))) newest.set(key, row);
    }
    const shown = new Set(rows.map((row) => row.number));
    for (const profile of PAYLOAD.profiles) {
      const about = ROWS[profile.row];
      if (!shown.has(profile.row) || known(about.forward) || profile.phases.length < 2) continue;
      const each = Object.fromEntries(profile.phases.map((phase) => [phase.name === "optimizer" ? "optimizer_step" : phase.name, Math.max(phase.host_s, phase.device_s) / (profile.steps || 1)]));
      newest.set(`profile ${profile.row}`, { ...about, ...each });
    }
    if (!newest.size) return null;
    const batches = distinct([...newest.values()].map((row) => row.batch ?? 0)).sort((a, b) => b - a);
    const crowded = newest.size > 10;
    const batch = pick(section, "batch", crowded ? batches.map((each) => [String(each), `batch ${each}`]) : [], redraw);
    const picked = [...newest.values()].filter((row) => !crowded || String(row.batch ?? 0) === batch);
    const [bars, remark] = limited(picked.sort((a, b) => a.series.localeCompare(b.series) || a.batch - b.batch), MOST_BARS, "runs");
    const whole = (row) => parts.reduce((sum, [name]) => sum + (row[name] ?? 0), 0);
    const present = parts.filter(([name]) => bars.some((row) => known(row[name])));
    const traces = stacked(bars, present.map(([name, label], place) => ({ label, colour: paletteColour([0, 1, 2, 4][place]), value: (row) => (known(row[name]) ? row[name] * 1e3 : null), told: (row) => `${label}: ${seconds(row[name])}, ${percent((row[name] ?? 0) / whole(row))} of the step<br>trust: ${plain(row.trust ?? "")}` })));
    const labels = bars.map(namer(bars, ["task"])).map((label, at) => `${label}${known(bars[at].batch) ? ` · b${bars[at].batch}` : ""}`);
    return { traces, remark, layout: layout({ barmode: "stack", height: barHeight(bars.length), xaxis: axis("ms per step", { rangemode: "tozero" }), yaxis: barAxis(labels) }) };
  },

  kernels(rows) {
    const shown = new Set(rows.map((row) => row.number));
    const [profiles, remark] = limited(PAYLOAD.profiles.filter((profile) => shown.has(profile.row) && profile.classes.length), MOST_BARS, "profiles");
    if (!profiles.length) return null;
    const names = distinct(profiles.flatMap((profile) => profile.classes.map((each) => each.name)));
    const part = (profile, name) => profile.classes.find((each) => each.name === name);
    const traces = names.map((name, place) => ({
      type: "bar", orientation: "h", label: name, y: profiles.map((_, at) => at), x: profiles.map((profile) => (part(profile, name) ? part(profile, name).share * 100 : null)),
      marker: { color: paletteColour(place), opacity: place >= 8 ? 0.55 : 1 }, hoverinfo: "text",
      hovertext: profiles.map((profile) => {
        const each = part(profile, name);
        if (!each) return "";
        const top = profile.kernels.filter((kernel) => kernel.class === name).slice(0, 3).map((kernel) => `${plain(kernel.name, 60)}: ${seconds(kernel.total_s)}`);
        return [`<b>${plain(name)}</b>`, `${percent(each.share)}, ${seconds(each.total_s)} in ${each.calls} calls`, ...top, `bound: ${plain(profile.bound)}`, `trust: ${plain(ROWS[profile.row].trust ?? "")}`].join("<br>");
      }),
    }));
    const abouts = profiles.map((profile) => ROWS[profile.row]);
    const labels = abouts.map(namer(abouts)).map((label, at) => `${label}${known(abouts[at].batch) ? ` · b${abouts[at].batch}` : ""}`);
    return { traces, remark, layout: layout({ barmode: "stack", height: barHeight(profiles.length), xaxis: axis("% of the busy time", { range: [0, 100] }), yaxis: barAxis(labels) }) };
  },

  treemap(rows, section, redraw) {
    const shown = new Set(rows.map((row) => row.number));
    const profiles = PAYLOAD.profiles.filter((profile) => shown.has(profile.row) && profile.kernels.length);
    if (!profiles.length) return null;
    const picked = pick(section, "profile", profiles.map((profile, at) => [String(at), `${ROWS[profile.row].recipe} · ${workloadName(ROWS[profile.row])}`]), redraw);
    const profile = profiles[Number(picked)] ?? profiles[0];
    const boxes = [];
    for (const [place, each] of profile.classes.entries()) {
      const own = profile.kernels.filter((kernel) => kernel.class === each.name);
      const rest = each.total_s - own.reduce((sum, kernel) => sum + kernel.total_s, 0);
      const told = `<b>${plain(each.name)}</b><br>${percent(each.share)}, ${seconds(each.total_s)} in ${each.calls} calls`;
      boxes.push({ id: each.name, parent: "", label: each.name, value: 0, place, told });
      for (const [number, kernel] of own.entries()) boxes.push({ id: `${each.name} ${number}`, parent: each.name, label: kernel.name, value: kernel.total_s, place, told: `<b>${plain(kernel.name, 90)}</b><br>${percent(kernel.share)}, ${seconds(kernel.total_s)} in ${kernel.calls} calls, ${seconds(kernel.mean_s)} each` });
      if (rest > 1e-3 * each.total_s) boxes.push({ id: `${each.name} rest`, parent: each.name, label: own.length ? "others" : each.name, value: rest, place, told });
    }
    const trace = {
      type: "treemap", branchvalues: "remainder", ids: boxes.map((box) => box.id), parents: boxes.map((box) => box.parent), labels: boxes.map((box) => plain(box.label, 60)), values: boxes.map((box) => box.value),
      marker: { colors: boxes.map((box) => paletteColour(box.place)), line: { width: 1, color: colour("card") } }, tiling: { pad: 1 }, pathbar: { visible: false },
      hoverinfo: "text", hovertext: boxes.map((box) => `${box.told}<br>trust: ${plain(ROWS[profile.row].trust ?? "")}`), textinfo: "label+percent root", textfont: { size: 12 },
    };
    return { traces: [trace], layout: layout({ height: isNarrow() ? 380 : 340, margin: { l: 0, r: 0, t: 4, b: 0 }, uniformtext: { minsize: 10, mode: "hide" }, showlegend: false }) };
  },

  telemetry(rows, section, redraw) {
    const shown = new Set(rows.map((row) => row.number));
    const kept = new Map(PAYLOAD.telemetry.filter((each) => shown.has(each.row)).map((each) => [each.row, each]));
    if (!kept.size) return null;
    const workloads = byWorkload([...kept.keys()].map((number) => ROWS[number]), (list) => [list.some((row) => known(row.ratio)) ? 1 : 0, list.length, list[0].batch ?? 0]);
    const all = pickWorkload(section, workloads, redraw).map((row) => kept.get(row.number));
    const kinds = { power_w: ["power", "W", 1], utilisation: ["utilisation", "%", 100], temperature_c: ["temperature", "°C", 1], clock_hz: ["clock", "MHz", 1e-6], memory_used_bytes: ["memory in use", "GiB", 2 ** -30] };
    const there = Object.keys(kinds).filter((name) => all.some((each) => each.series[name]));
    const name = pick(section, "figure", there.map((each) => [each, kinds[each][0]]), redraw);
    const [title, unit, factor] = kinds[name];
    const [lines, remark] = limited(all.filter((each) => each.series[name]).reverse(), MOST_SERIES, "records");
    const traces = lines.map((each, place) => {
      const about = ROWS[each.row];
      const look = style(about);
      const twin = lines.findIndex((other) => ROWS[other.row].recipe === about.recipe) !== place;
      return {
        type: "scatter", connectgaps: false, mode: each.t.length > 1 ? "lines" : "markers", label: `${about.recipe}${about.kind === "profile" ? " (beside a profile)" : ""}`,
        x: each.t, y: each.series[name].map((value) => (known(value) ? value * factor : null)), line: { color: look.colour, width: 1.8, dash: twin ? "dot" : "solid" }, marker: { color: look.colour, symbol: look.symbol }, opacity: twin ? 0.75 : 1,
        hoverinfo: "text", hovertext: each.t.map((at, place_) => `<b>${plain(about.recipe, 60)}</b><br>${figure(at, 4)} s: ${known(each.series[name][place_]) ? figure(each.series[name][place_] * factor, 4) : "n/a"} ${unit}${each.throttle[place_] ? `<br>throttle: ${plain(each.throttle[place_])}` : ""}<br>trust: ${plain(about.trust ?? "")}`),
      };
    });
    return { traces, remark, layout: layout({ height: 360, xaxis: axis("seconds since the first timed block"), yaxis: axis(`${title}, ${unit}`, { rangemode: name === "clock_hz" || name === "memory_used_bytes" ? "normal" : "tozero" }) }) };
  },

  held(rows, section, redraw) {
    const steps = PAYLOAD.memories;
    if (!steps.length) return null;
    const step = steps[Number(pick(section, "step", steps.map((each, at) => [String(at), each.name]), redraw))];
    const told = (label, values) => values.map((bytes, at) => `<b>${plain(label)}</b><br>${figure(bytes / 2 ** 20, 4)} MiB in the ${plain(step.phase[at])} pass`);
    const x = step.at.map((at) => 100 * at);
    const traces = Object.entries(step.kinds).map(([kind, bytes], place) => ({
      type: "scatter", mode: "lines", stackgroup: "held", label: kind, x, y: bytes.map((each) => each / 2 ** 20),
      line: { color: paletteColour(place), width: 1 }, hoverinfo: "text", hovertext: told(kind, bytes),
    }));
    if (step.reserved.some(known)) {
      traces.push({
        type: "scatter", mode: "lines", label: "reserved", x, y: step.reserved.map((each) => (known(each) ? each / 2 ** 20 : null)),
        line: { color: colour("ink"), width: 1.6, dash: "dash" }, hoverinfo: "text", hovertext: told("reserved", step.reserved),
      });
    }
    return { traces, layout: layout({ height: 360, xaxis: axis("% of a step, by allocations"), yaxis: axis("MiB", { rangemode: "tozero" }) }) };
  },

  generation: (rows, section, redraw) => {
    const kept = rows.filter((row) => known(row.tpot));
    if (!kept.length) return null;
    const figures = { tpot: ["time per token", "ms", 1e3], ttft: ["time to the first token", "ms", 1e3], bandwidth_share: ["copy bandwidth reached in decode", "%", 100] };
    const field = pick(section, "figure", Object.keys(figures).map((name) => [name, figures[name][0]]), redraw);
    const [title, unit, factor] = figures[field];
    const name = namer(kept);
    const lines = [...Map.groupBy(kept, (row) => `${row.model} ${row.recipe} ${row.setting ?? ""}`).values()];
    const [shown, remark] = limited(lines, MOST_SERIES, "recipes");
    const traces = shown.map((line, place) => {
      const points = [...line].sort((one, other) => (one.batch ?? 0) - (other.batch ?? 0));
      return {
        type: "scatter", mode: "lines+markers", label: name(points[0]), x: points.map((row) => row.decode_rate), y: points.map((row) => (known(row[field]) ? row[field] * factor : null)),
        line: { color: paletteColour(place), width: 2 }, marker: { size: 7, color: paletteColour(place) }, hoverinfo: "text",
        hovertext: points.map((row) => `<b>${plain(name(row), 70)}</b><br>batch ${row.batch}: ${figure(row.decode_rate, 4)} tokens/s, ${known(row[field]) ? figure(row[field] * factor, 4) : "n/a"} ${unit}<br>record ${plain(row.record_id)}`),
      };
    });
    const [across, up] = ["x", "y"].map((side) => traces.flatMap((trace) => trace[side].filter(known)));
    return { traces, remark, layout: layout({ xaxis: logWhenWide(axis("tokens written per second"), across), yaxis: logWhenWide(axis(`${title}, ${unit}`), up) }) };
  },

  load: (rows, section, redraw) => {
    const kept = linesOf("loads", rows).filter((line) => line[0].about);
    if (!kept.length) return null;
    const figures = {
      latency: ["latency", "ms", 1e3, [["latency_p99", "solid"], ["latency_p50", "dash"]]],
      queue: ["waiting for the device", "ms", 1e3, [["queue", "solid"]]],
      batching: ["waiting for the batch to fill", "ms", 1e3, [["batching", "solid"]]],
      compute: ["computing", "ms", 1e3, [["compute", "solid"]]],
      batch: ["requests per batch", "", 1, [["mean_batch", "solid"]]],
      achieved: ["requests completed per second", "", 1, [["achieved_rate", "solid"]]],
      busy: ["device busy", "%", 100, [["busy", "solid"]]],
    };
    const chosen = figures[pick(section, "figure", Object.keys(figures).map((name) => [name, figures[name][0]]), redraw)];
    const { traces, remark, lines } = overLines(kept, chosen, "rate", "loads", (point) => `${figure(point.rate, 4)} requests/s`);
    const [title, unit] = chosen;
    const values = traces.flatMap((trace) => trace.y.filter(known));
    return { traces, remark, layout: layout({ xaxis: logWhenWide(axis("requests per second"), lines.flat().map((point) => point.rate)), yaxis: logWhenWide(axis(unit ? `${title}, ${unit}` : title), values) }) };
  },

  learning: (rows, section, redraw) =>
    byEpoch(rows, section, redraw, {
      accuracy: ["accuracy", "%", 100, [["accuracy", "solid"]]],
      loss: ["loss", "", 1, [["val_loss", "solid"], ["train_loss", "dash"]]],
    }),

  epochs: (rows, section, redraw) =>
    byEpoch(rows, section, redraw, {
      seconds: ["epoch time", "s", 1, [["seconds", "solid"]]],
      throughput: ["samples per second", "", 1, [["throughput", "solid"]]],
      data_wait: ["waiting for data", "% of the time", 100, [["data_wait", "solid"]]],
      memory: ["memory", "MiB", 2 ** -20, [["memory", "solid"]]],
      utilisation: ["utilisation", "%", 100, [["utilisation", "solid"]]],
    }),

  gains(rows, section, redraw) {
    const searches = linesOf("gains", rows, (line) => line.path);
    if (!searches.length) return null;
    const chosen = pick(section, "search", searches.map((bars, at) => [String(at), bars[0].path]), redraw);
    const bars = (searches[Number(chosen)] ?? searches[0]).map((bar) => ({ label: bar.stage, told: bar.gain, kind: bar.kind, seconds: bar.step }));
    const title = (searches[Number(chosen)] ?? searches[0])[0].path;
    const colours = { baseline: colour("muted"), without: paletteColour(5), winner: paletteColour(0), roofline: paletteColour(2) };
    const trace = {
      type: "bar", orientation: "h", x: bars.map((bar) => bar.seconds * 1e3), y: bars.map((_, place) => place),
      marker: { color: bars.map((bar) => colours[bar.kind]), opacity: bars.map((bar) => (bar.kind === "roofline" ? 0.55 : 1)), pattern: { shape: bars.map((bar) => (bar.kind === "roofline" ? "/" : "")), fgcolor: colour("card"), size: 7, solidity: 0.3 } },
      text: bars.map((bar) => plain(isNarrow() ? seconds(bar.seconds) : `${seconds(bar.seconds)}   ${bar.told}`)), textposition: "outside", cliponaxis: false, textfont: { size: 12 }, constraintext: "none",
      hoverinfo: "text", hovertext: bars.map((bar) => `<b>${plain(bar.label, 70)}</b><br>${seconds(bar.seconds)}<br>${plain(bar.told)}`),
    };
    const most = Math.max(...bars.map((bar) => bar.seconds)) * 1e3;
    return { traces: [trace], remark: searches.length < 2 ? oneLine(title) : "", layout: layout({ height: barHeight(bars.length), xaxis: axis("ms per step", { range: [0, most * (isNarrow() ? 1.4 : 1.5)] }), yaxis: barAxis(bars.map((bar) => bar.label)) }) };
  },

  roofline(rows, section, redraw) {
    if (!PAYLOAD.rooflines.length) return null;
    const shown = new Set(rows.map((row) => row.number));
    const charts = PAYLOAD.rooflines.map((each) => ({ ...each, points: each.points.filter((point) => shown.has(point.row)) })).filter((each) => each.points.length);
    if (!charts.length) return null;
    const place = pick(section, "device", charts.map((each, at) => [String(at), each.title]), redraw);
    const { roofs, points: every } = charts[Number(place)];
    // One workload at a time: points of several models on one chart cannot be told apart.
    const workloads = byWorkload(every.map((point) => ROWS[point.row]), (list) => [list.some((row) => known(row.ratio_low)) ? 1 : 0, list.length, list[0].batch ?? 0]);
    const under = new Set(pickWorkload(section, workloads, redraw).map((row) => row.number));
    const [points, many] = limited(every.filter((point) => under.has(point.row)).reverse(), MOST_BARS, "runs");
    const beaten = points.filter((point) => point.beaten);
    const remark = [many, beaten.length ? `Above a roof: ${beaten.map((point) => `${point.label}: ${point.beaten}`).join("; ")}` : ""].filter(Boolean).join(" ");
    const intensities = points.map((point) => point.intensity);
    const [left, right] = [Math.min(0.5, ...intensities) / 2, Math.max(100, ...intensities) * 3];
    const slope = Math.max(...roofs.map((roof) => roof.bytes_per_s ?? 0));
    const peak = Math.max(...roofs.map((roof) => roof.flops_per_s ?? 0));
    const traces = roofs.map((roof, at) => {
      const flat = known(roof.flops_per_s);
      const from = flat ? (slope ? roof.flops_per_s / slope : left) : left;
      const to = flat ? right : peak ? peak / roof.bytes_per_s : right;
      return { type: "scatter", mode: "lines", label: roof.label, meta: "guide", x: [from, to], y: flat ? [roof.flops_per_s / 1e12, roof.flops_per_s / 1e12] : [(from * roof.bytes_per_s) / 1e12, (to * roof.bytes_per_s) / 1e12], line: { color: paletteColour(at), width: 2, dash: DASHES[at % DASHES.length] }, hoverinfo: "text", hovertext: [plain(roof.label), plain(roof.label)] };
    });
    const looks = points.map((point) => style(ROWS[point.row]));
    const few = points.length <= 6 && !isNarrow();
    traces.push({ type: "scatter", mode: few ? "markers+text" : "markers", showlegend: false, x: intensities, y: points.map((point) => point.flops_per_s / 1e12), text: points.map((point) => plain(point.label, 24)), textposition: "top center", marker: { size: 11, color: looks.map((look) => look.colour), symbol: looks.map((look) => look.symbol) }, hoverinfo: "text", hovertext: points.map((point) => `<b>${plain(point.label, 70)}</b><br>${figure(point.intensity)} FLOP/byte<br>${figure(point.flops_per_s / 1e12)} TFLOP/s<br>${plain(point.told, 120)}<br>${rowTold(ROWS[point.row])}`) });
    const operators = points.flatMap((point) => point.operators.map((each) => ({ ...each, of: point })));
    if (operators.length) traces.push({ type: "scatter", mode: isNarrow() || operators.length > 12 ? "markers" : "markers+text", label: "operators, unfused", meta: "guide", x: operators.map((each) => each.intensity), y: operators.map((each) => each.flops_per_s / 1e12), text: operators.map((each) => plain(each.label, 18)), textposition: "bottom center", marker: { size: 7, symbol: "circle-open", color: operators.map((each) => style(ROWS[each.of.row]).colour) }, hoverinfo: "text", hovertext: operators.map((each) => `<b>${plain(each.label, 40)}</b> of ${plain(each.of.label, 50)}<br>at its own limit: ${figure(each.flops_per_s / 1e12)} TFLOP/s, ${figure(each.intensity)} FLOP/byte<br>limited by ${plain(each.limited_by)}`) });
    const base = points.find((point) => ROWS[point.row].recipe === "baseline");
    const best = [...points].filter((point) => ROWS[point.row].sound && ROWS[point.row].verdict === "faster").sort((one, other) => ROWS[other.row].ratio - ROWS[one.row].ratio)[0];
    const log = Math.log10;
    const arrows = base && best && best !== base ? [{ x: log(best.intensity), y: log(best.flops_per_s / 1e12), ax: log(base.intensity), ay: log(base.flops_per_s / 1e12), xref: "x", yref: "y", axref: "x", ayref: "y", showarrow: true, arrowhead: 3, arrowwidth: 2, arrowcolor: colour("accent"), opacity: 0.7, text: "" }] : [];
    return { traces, remark, layout: layout({ height: 420, annotations: arrows, xaxis: axis("FLOP per byte", { type: "log", dtick: 1 }), yaxis: axis("TFLOP/s", { type: "log", dtick: 1 }) }) };
  },
};

function barText(row, tellsRatio) {
  const doubt = row.sound ? (row.trusted ? "" : row.trust ?? "") : "numerics ✗";
  return [row.shown.throughput, tellsRatio ? row.shown.ratio : "", doubt].filter(Boolean).map((part) => plain(part)).join("   ");
}

function againstBatch(section, rows, redraw, value, { error }) {
  const usable = rows.filter((row) => known(value(row)) && known(row.batch));
  if (!usable.length) return null;
  const measured = pickSubject(section, usable, redraw);
  const series = batchSeries(measured);
  const [lines, remark] = limited(withFewSinglePoints(series), MOST_SERIES, "series");
  const name = namer(lines.flat());
  const traces = lines.map((line) => {
    const look = style(line[0]);
    const errors = error ? line.map(error) : null;
    return {
      type: "scatter", mode: "lines+markers", label: name(line[0]), legendgroup: line[0].series, x: line.map((row) => row.batch), y: line.map(value),
      line: { color: look.colour, width: 2.2, dash: look.dash },
      marker: { symbol: line.map((row) => (row.trusted && row.sound ? look.symbol : `${look.symbol}-open`)), size: 8.5, color: look.colour, line: { width: 1.6, color: look.colour } },
      error_y: errors ? { type: "data", symmetric: false, array: errors.map((each) => each[0]), arrayminus: errors.map((each) => each[1]), color: look.colour, thickness: 1.2, width: 3 } : undefined,
      hoverinfo: "text", hovertext: line.map(rowTold),
    };
  });
  const doubtful = lines.flat().some((row) => !row.trusted || !row.sound);
  return { traces, lines, remark: [remark, lines.length < series.length && !remark ? `${series.length - lines.length} recipes measured at one batch only are under "Recipes compared".` : "", doubtful ? "Open markers are unreliable: noisy, or too far from fp32." : ""].filter(Boolean).join(" ") };
}

// Beside lines, a few points are enough: the fastest, whatever the chart shows of them.
function withFewSinglePoints(series) {
  const lines = series.filter((line) => line.length > 1);
  if (!lines.length) return series;
  const single = series.filter((line) => line.length === 1).sort((a, b) => (b[0].throughput ?? 0) - (a[0].throughput ?? 0));
  return [...lines, ...single.slice(0, MOST_SINGLE_POINTS)];
}

function newestOfEach(list, key, most) {
  const seen = new Map();
  return list.filter((each) => {
    seen.set(key(each), (seen.get(key(each)) ?? 0) + 1);
    return seen.get(key(each)) <= most;
  });
}

function mostCommon(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((one, other) => other[1] - one[1])[0]?.[0];
}

function stacked(bars, parts) {
  return parts.map((part) => ({
    type: "bar", orientation: "h", label: part.label, y: bars.map((_, place) => place), x: bars.map(part.value), marker: { color: part.colour },
    hoverinfo: "text", hovertext: bars.map((row) => `<b>${plain(row.recipe, 60)}</b><br>${part.told(row)}`),
  }));
}

// Every label is a whole number: plotly's own would call 50 "5".
function logTicks(low, high) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) for (const digit of [1, 2, 5]) ticks.push(digit * 10 ** power);
  return { tickvals: ticks, ticktext: ticks.map((value) => figure(value, 1)) };
}

function logWhenWide(made, values) {
  const positive = values.filter((value) => value > 0);
  const wide = positive.length > 1 && Math.max(...positive) / Math.min(...positive) > 12;
  return wide ? { ...made, type: "log", ...logTicks(Math.min(...positive), Math.max(...positive)) } : { ...made, rangemode: "tozero" };
}

// Trainings epoch by epoch: one figure at a time, each made of one line or two.
function byEpoch(rows, section, redraw, figures) {
  const kept = linesOf("epochs", rows).filter((line) => line[0].about);
  const there = Object.keys(figures).filter((name) => figures[name][3].some(([field]) => kept.flat().some((epoch) => known(epoch[field]))));
  if (!there.length) return null;
  const chosen = figures[pick(section, "figure", there.map((name) => [name, figures[name][0]]), redraw)];
  const { traces, remark, lines } = overLines(kept, chosen, "epoch", "trainings", (epoch) => `epoch ${epoch.epoch}`);
  const [title, unit] = chosen;
  const few = Math.max(...lines.map((epochs) => epochs.length)) <= 12;
  return { traces, remark, layout: layout({ xaxis: axis("epoch", few ? { dtick: 1 } : {}), yaxis: axis(unit ? `${title}, ${unit}` : title, { rangemode: "tozero" }) }) };
}

// One line for each record of a table, such as its epochs; a second figure of the same kind is dashed.
const SECOND = { train_loss: " (training)", latency_p50: " (p50)" };
function overLines(kept, [, unit, factor, parts], across, what, called) {
  const [lines, remark] = limited([...kept].reverse(), MOST_SERIES, what);
  const name = namer(lines.map((points) => points[0].about));
  const traces = lines.flatMap((points, place) => parts.filter(([field]) => points.some((point) => known(point[field]))).map(([field, dash]) => {
    const about = points[0].about;
    return {
      type: "scatter", mode: "lines+markers", label: `${name(about)}${SECOND[field] ?? ""}`, legendgroup: String(about.number), x: points.map((point) => point[across]),
      y: points.map((point) => (known(point[field]) ? point[field] * factor : null)), line: { color: paletteColour(place), width: 2, dash }, marker: { size: 6, color: paletteColour(place) },
      hoverinfo: "text", hovertext: points.map((point) => `<b>${plain(name(about), 70)}</b><br>${called(point)}: ${known(point[field]) ? figure(point[field] * factor, 4) : "n/a"} ${unit}<br>record ${plain(about.record_id)}`),
    };
  }));
  return { traces, remark, lines };
}
