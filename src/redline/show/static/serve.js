"use strict";
// Everything from the server is set as text: names of models are not markup.
(() => {
  const now = document.getElementById("now");
  const connection = document.getElementById("connection");
  const seconds = (value) => (value == null ? "–" : value < 1 ? `${(value * 1e3).toPrecision(4)} ms` : `${value.toPrecision(4)} s`);
  const line = (words) => {
    const element = document.createElement("p");
    element.textContent = words.filter(Boolean).join(" · ");
    return element;
  };
  const left = (value) => (value == null ? "" : value < 90 ? `about ${Math.round(value)} s left` : value < 5400 ? `about ${Math.round(value / 60)} min left` : `about ${(value / 3600).toFixed(1)} h left`);
  const readings = (each) => [
    each.power ? `${Math.round(each.power)} W` : "", each.temperature_c ? `${Math.round(each.temperature_c)} °C` : "",
    each.utilisation != null ? `${Math.round(100 * each.utilisation)} % busy` : "",
    each.memory_used_bytes ? `${(each.memory_used_bytes / 1e9).toFixed(1)} GB used` : "",
  ];
  const show = (state) => {
    const lines = [];
    if (state.problem) lines.push(line([state.problem]));
    for (const tune of state.tunes) {
      const leader = tune.leader ? `leader ${tune.leader}${tune.ratio ? ` ${tune.ratio.toFixed(2)}×` : ""}` : "no leader yet";
      const ahead = tune.state === "running" ? `${Math.round(tune.left_s)} s left at most` : "cut short; the same command goes on";
      lines.push(line([`tune ${tune.name}`, `${tune.trials} trials`, leader, ahead]));
    }
    for (const sweep of state.sweeps) {
      const count = sweep.total == null ? `${sweep.settled} cells settled` : `${sweep.settled} of ${sweep.total} cells settled`;
      lines.push(line([
        `sweep ${sweep.name}`, sweep.state === "cut short" ? "cut short; the same command goes on" : sweep.state, count,
        sweep.failed ? `${sweep.failed} failed` : "", sweep.state === "running" && sweep.now ? `now ${sweep.now}` : "", left(sweep.left_s),
        sweep.leader ? `fastest ${sweep.leader}, ${sweep.per_s.toPrecision(4)} per second` : "", ...readings(sweep.readings),
      ]));
    }
    for (const watch of state.watches) lines.push(line([`watch ${watch.name}`, watch.now, ...readings(watch.readings)]));
    for (const record of state.records) {
      lines.push(line([
        `${record.model} ${record.task} ${record.recipe}`, record.batch ? `batch ${record.batch}` : "", record.device,
        record.total_epochs ? `epoch ${record.epochs} of ${record.total_epochs}` : `${record.blocks} blocks`,
        record.step_s ? `${seconds(record.step_s)} a step` : "preparing", left(record.left_s), ...readings(record.readings),
      ]));
    }
    if (!lines.length) lines.push(line(["nothing is being measured"]));
    now.replaceChildren(...lines);
  };
  if (!now) return;
  // Tables are fetched anew some seconds after a record begins or ends, and not by all viewers at the same moment.
  let waiting = false;
  const refresh = async () => {
    waiting = false;
    const answer = await fetch(location.pathname + location.search).catch(() => null);
    if (!answer || !answer.ok) return;
    const other = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["benchmarks", "latest"]) document.getElementById(id).replaceWith(other.getElementById(id));
  };
  const source = new EventSource("/events");
  let latest;
  source.onopen = () => { connection.textContent = "live"; };
  source.onerror = () => { connection.textContent = "connection lost, trying again"; };
  source.onmessage = (event) => {
    const state = JSON.parse(event.data);
    show(state);
    const seen = `${state.latest} ${state.records.length} ${state.stored}`;
    if (latest !== undefined && seen !== latest && !waiting) {
      waiting = true;
      setTimeout(refresh, 1000 + 7000 * Math.random());
    }
    latest = seen;
  };
})();
