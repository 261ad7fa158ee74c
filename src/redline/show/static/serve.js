"use strict";
// Everything from the server is set as text: names of models are not markup.
(() => {
  const now = document.getElementById("now");
  const connection = document.getElementById("connection");
  if (!now) return;
  const show = (state) => {
    const lines = [state.problem, ...state.lines].filter(Boolean);
    now.replaceChildren(...(lines.length ? lines : ["nothing is being measured"]).map((text) => {
      const element = document.createElement("p");
      element.textContent = text;
      return element;
    }));
  };
  // The lists below show the rows that have every word of the search.
  const filter = document.getElementById("filter");
  const narrow = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("section tbody tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  };
  filter.addEventListener("input", narrow);
  // Tables are fetched anew some seconds after a record begins or ends, and not by all viewers at the same moment.
  let waiting = false;
  const refresh = async () => {
    waiting = false;
    const answer = await fetch(location.pathname + location.search).catch(() => null);
    if (!answer || !answer.ok) return;
    const other = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const id of ["history", "history-show"]) document.getElementById(id).replaceWith(other.getElementById(id));
    narrow();
  };
  const source = new EventSource("/events");
  let latest;
  source.onopen = () => { connection.textContent = "live"; };
  source.onerror = () => { connection.textContent = "connection lost, trying again"; };
  source.onmessage = (event) => {
    const state = JSON.parse(event.data);
    show(state);
    const seen = `${state.latest} ${state.lines.length} ${state.stored}`;
    if (latest !== undefined && seen !== latest && !waiting) {
      waiting = true;
      setTimeout(refresh, 1000 + 7000 * Math.random());
    }
    latest = seen;
  };
})();
