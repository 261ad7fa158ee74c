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
  const show = (state) => {
    const lines = [];
    for (const tune of state.tunes) {
      const leader = tune.leader ? `leader ${tune.leader}${tune.ratio ? ` ${tune.ratio.toFixed(2)}×` : ""}` : "no leader yet";
      lines.push(line([`tune ${tune.name}`, `${tune.trials} trials`, leader, `${Math.round(tune.left_s)} s left at most`]));
    }
    for (const sweep of state.sweeps) {
      lines.push(line([`sweep ${sweep.name}`, `${sweep.settled} cells settled`, sweep.failed ? `${sweep.failed} failed` : ""]));
    }
    for (const record of state.records) {
      lines.push(line([
        `${record.model} ${record.task} ${record.recipe}`, record.batch ? `batch ${record.batch}` : "", record.device,
        `${record.blocks} blocks`, record.step_s ? `${seconds(record.step_s)} a step` : "preparing",
        record.power_w ? `${Math.round(record.power_w)} W` : "", record.temperature_c ? `${Math.round(record.temperature_c)} °C` : "",
        record.utilisation != null ? `${Math.round(100 * record.utilisation)} % busy` : "",
      ]));
    }
    if (!lines.length) lines.push(line(["nothing is being measured"]));
    now.replaceChildren(...lines);
  };
  if (!now) return;
  const source = new EventSource("/events");
  let latest;
  source.onopen = () => { connection.textContent = "live"; };
  source.onerror = () => { connection.textContent = "connection lost, trying again"; };
  source.onmessage = (event) => {
    const state = JSON.parse(event.data);
    show(state);
    if (latest !== undefined && state.latest !== latest && !state.records.length) location.reload();
    latest = state.latest;
  };
})();
