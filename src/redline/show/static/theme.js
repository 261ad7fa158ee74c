// Light and dark: the system's wish, until the button says otherwise. Colours are told apart by the colour-blind too.

const PALETTES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b5478a", "#b07c00", "#3d9bd6", "#6b57a8", "#7a5c22"],
  dark: ["#56aee8", "#ff9457", "#3fcf9f", "#e79ccb", "#f0c24b", "#9ad4f5", "#b8a6ee", "#cdb07a"],
};
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "hexagon", "pentagon"];
const DASHES = ["solid", "dash", "longdash", "dashdot"];

const wishesDark = window.matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : wishesDark.matches;
}
function remembered(value) {
  // A page opened from a file may be denied storage: then the choice lasts as long as the page.
  try {
    if (value) localStorage.setItem("redline-theme", value);
    return localStorage.getItem("redline-theme");
  } catch {
    return null;
  }
}
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A recipe keeps its colour in every chart and under every filter.
const PLACES = new Map(distinct(ROWS.map((row) => row.recipe)).map((recipe, place) => [recipe, place]));
const SERIES_PLACES = new Map(distinct(ROWS.map((row) => row.series)).map((series, place) => [series, place]));

function style(row) {
  const palette = PALETTES[isDark() ? "dark" : "light"];
  const recipe = PLACES.get(row.recipe) ?? 0;
  const alone = PLACES.size === 1 ? (SERIES_PLACES.get(row.series) ?? 0) : recipe;
  const same = [...SERIES_PLACES.keys()].filter((key) => key.endsWith(`\u0000${row.recipe}`)).indexOf(row.series);
  return {
    colour: palette[alone % palette.length],
    symbol: SYMBOLS[alone % SYMBOLS.length],
    dash: PLACES.size === 1 ? "solid" : DASHES[Math.max(0, same) % DASHES.length],
  };
}
function paletteColour(place) {
  const palette = PALETTES[isDark() ? "dark" : "light"];
  return palette[place % palette.length];
}

function watchTheme(changed) {
  const before = remembered(null);
  if (before === "dark" || before === "light") document.documentElement.dataset.theme = before;
  document.getElementById("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remembered(document.documentElement.dataset.theme);
    changed();
  });
  wishesDark.addEventListener("change", changed);
}
