// Start: the table and the filters at once, the library unpacked beside, each chart when it comes into view.

const SECTIONS = [...document.querySelectorAll("section[data-chart]")];
const stale = new Set(SECTIONS);
const inView = new Set();
let libraryReady = false;

function drawSection(section) {
  const made = CHARTS[section.dataset.chart](shownRows(), section, () => drawSection(section));
  const plot = section.querySelector(".plot");
  const remark = section.querySelector(".remark");
  stale.delete(section);
  section.dataset.drawn = made ? "yes" : "empty";
  if (!made) {
    window.Plotly.purge(plot);
    plot.replaceChildren(element("p", { class: "hint" }, "Nothing to show under these filters."));
    remark.hidden = true;
    section.querySelector(".legend").replaceChildren();
    return;
  }
  if (plot.querySelector(":scope > p")) plot.replaceChildren();
  window.Plotly.react(plot, made.traces, made.layout, CONFIG);
  drawLegend(section, plot, made.traces);
  remark.textContent = made.remark ?? "";
  remark.hidden = !made.remark;
}

function drawStale() {
  if (!libraryReady) return;
  for (const section of SECTIONS) if (inView.has(section) && stale.has(section)) drawSection(section);
}

function filtersChanged() {
  const rows = shownRows();
  keepState();
  tellShown(rows);
  showAnswers(rows);
  drawTimeline();
  drawTable(rows);
  for (const section of SECTIONS) stale.add(section);
  drawStale();
}

function watchSections() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) inView.add(entry.target);
      else inView.delete(entry.target);
    }
    drawStale();
  }, { rootMargin: "250px" });
  for (const section of SECTIONS) watcher.observe(section);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if ((width < 640) !== isNarrow()) redrawAll();
    width = window.innerWidth;
  });
  window.addEventListener("beforeprint", () => {
    if (libraryReady) for (const section of SECTIONS) if (stale.has(section)) drawSection(section);
  });
}

// The captured step: one profile at a time, of those that the filters leave.
let boxViews = [];
function drawTimeline() {
  const section = document.getElementById("timeline");
  if (!section) return;
  const shown = new Set(shownRows().map((row) => row.number));
  const there = PAYLOAD.lanes.filter((each) => shown.has(each.row));
  section.hidden = !there.length;
  if (!there.length) return;
  const chosen = pick(section, "profile", there.map((each) => [String(each.row), `${ROWS[each.row].recipe} · ${workloadName(ROWS[each.row])}`]), drawTimeline);
  boxViews = drawLanes(section.querySelector(".boxes"), there.find((each) => String(each.row) === chosen));
}

function redrawAll() {
  drawComparison();
  for (const each of boxViews) each.redraw();
  for (const section of SECTIONS) stale.add(section);
  drawStale();
}

async function loadLibrary() {
  const holder = document.getElementById("library");
  const packed = Uint8Array.from(atob(holder.textContent), (character) => character.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(unpacked).text();
  holder.remove();
  document.head.append(script);
}

async function start() {
  watchTheme(redrawAll);
  restoreState();
  buildFilters(filtersChanged);
  watchCopies();
  buildTable(() => {
    keepState();
    drawTable(shownRows());
  });
  tellShown(shownRows());
  showAnswers(shownRows());
  drawTable(shownRows());
  drawComparison();
  document.getElementById("uncompare")?.addEventListener("click", () => { compared.length = 0; toggleCompared(null); });
  watchSections();
  drawTimeline();
  if (SECTIONS.length) {
    if (typeof DecompressionStream === "undefined") {
      for (const section of SECTIONS) section.querySelector(".plot").replaceChildren(element("p", { class: "hint" }, "The charts need a browser of 2023 or later; the table below does not."));
    } else {
      await loadLibrary();
      libraryReady = true;
      drawStale();
      drawComparison();
    }
  }
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start();
