// Boxes on lanes, drawn on a canvas: the timeline of the captured step and the flame view. Fast with 20 000 boxes.

const BOX_HEIGHT = 16;
const LANE_GAP = 12;
const LABELS = 16;
const GAP_COLOURS = { host: "#d55e00", sync: "#b5478a", data: "#b07c00", allocator: "#7a5c22", "warm-up": "#6b57a8", latency: "#3d9bd6", launch: "#e69f00", dependency: "#8a94a3", unknown: "#8a94a3" };

function hueOf(text) {
  let hash = 0;
  for (const character of text) hash = (hash * 31 + character.charCodeAt(0)) % 360;
  return hash;
}
function boxColour(name, onDevice) {
  return `hsl(${hueOf(name)} ${onDevice ? 55 : 30}% ${boxesAreDark() ? 42 : 72}%)`;
}
function boxesAreDark() {
  return getComputedStyle(document.body).backgroundColor.match(/\d+/g).slice(0, 3).reduce((sum, each) => sum + Number(each), 0) < 380;
}
function microseconds(value) {
  if (value >= 1000) return `${(value / 1000).toPrecision(4)} ms`;
  return `${value.toPrecision(3)} µs`;
}

// `rows`: [{label, onDevice, boxes: [{name, from, length, depth, told, launch}]}]; times from 0 to `span`.
function boxView(holder, { rows, gaps = [], bands = [], span, unit, zoomOnClick = false }) {
  const canvas = document.createElement("canvas");
  const tip = document.createElement("div");
  tip.className = "boxtip";
  tip.hidden = true;
  const tools = document.createElement("div");
  tools.className = "boxtools";
  holder.replaceChildren(tools, canvas, tip);
  const view = { from: 0, to: span };
  let chosen = null;
  let top = bands.length ? 18 : 0;
  const lanes = rows.map((row) => {
    const depth = 1 + row.boxes.reduce((most, box) => Math.max(most, box.depth), 0);
    const lane = { ...row, top: top + (row.label ? LABELS : 0), boxes: [...row.boxes].sort((one, other) => one.from - other.from) };
    lane.longest = lane.boxes.reduce((most, box) => Math.max(most, box.length), 0);
    lane.bottom = lane.top + depth * BOX_HEIGHT;
    top = lane.bottom + LANE_GAP;
    return lane;
  });
  const height = top + 16;
  canvas.style.height = `${height}px`;
  const width = () => canvas.clientWidth || 600;
  const at = (time) => ((time - view.from) / (view.to - view.from)) * width();
  const timeAt = (x) => view.from + (x / width()) * (view.to - view.from);
  let queued = false;
  const redraw = () => {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => { queued = false; draw(); });
  };
  function firstIn(boxes, time) {
    let [low, high] = [0, boxes.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (boxes[middle].from < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  function draw() {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width() * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(document.body);
    const ink = style.color;
    pen.font = `11px ${style.fontFamily}`;
    pen.textBaseline = "middle";
    for (const band of bands) {
      const [left, right] = [at(band.from), at(band.from + band.length)];
      if (right < 0 || left > width()) continue;
      pen.fillStyle = boxColour(band.name, false);
      pen.fillRect(left, 0, Math.max(1, right - left), 14);
      pen.fillStyle = ink;
      if (right - left > 40) pen.fillText(band.name, Math.max(left, 0) + 4, 7, right - left - 6);
    }
    for (const lane of lanes) {
      pen.fillStyle = ink;
      if (lane.label) pen.fillText(lane.label, 2, lane.top - LABELS / 2);
      let painted = new Map();
      for (let place = firstIn(lane.boxes, view.from - lane.longest); place < lane.boxes.length; place += 1) {
        const box = lane.boxes[place];
        if (box.from > view.to) break;
        const [left, right] = [at(box.from), at(box.from + box.length)];
        if (right < 0) continue;
        // Boxes narrower than a pixel that fall on one already painted are not painted again.
        const pixel = Math.round(right * 2);
        if (right - left < 0.5 && painted.get(box.depth) === pixel) continue;
        painted.set(box.depth, pixel);
        const y = lane.top + box.depth * BOX_HEIGHT;
        pen.fillStyle = box === chosen ? "#c8102e" : boxColour(box.name, lane.onDevice);
        pen.fillRect(left, y, Math.max(0.7, right - left - 0.4), BOX_HEIGHT - 2);
        if (right - left > 34) {
          pen.fillStyle = box === chosen ? "#fff" : ink;
          const room = right - Math.max(left, 0) - 6;
          const fits = Math.max(0, Math.floor(room / 6.2));
          pen.fillText(box.name.length > fits ? `${box.name.slice(0, Math.max(0, fits - 1))}…` : box.name, Math.max(left, 0) + 3, y + BOX_HEIGHT / 2 - 1);
        }
      }
    }
    for (const gap of gaps) {
      const [left, right] = [at(gap.from), at(gap.from + gap.length)];
      if (right < 0 || left > width() || right - left < 0.3) continue;
      const lane = lanes[gap.lane];
      pen.fillStyle = GAP_COLOURS[gap.cause] ?? "#8a94a3";
      pen.fillRect(left, lane.bottom - 1, Math.max(0.7, right - left), 4);
      // A gap that is wide enough says why, where nothing else stands.
      if (right - left > 70 && lane.bottom - lane.top === BOX_HEIGHT) {
        pen.fillStyle = ink;
        pen.globalAlpha = 0.7;
        pen.fillText(`idle: ${gap.cause}`, Math.max(left, 0) + 4, lane.top + BOX_HEIGHT / 2 - 1, right - Math.max(left, 0) - 8);
        pen.globalAlpha = 1;
      }
    }
    if (chosen && chosen.launch !== null && chosen.launch !== undefined) arrow(pen);
    pen.fillStyle = ink;
    pen.textAlign = "right";
    pen.fillText(`${unit(view.to - view.from)} shown of ${unit(span)}`, width() - 2, height - 7);
    pen.textAlign = "left";
    holder.dataset.drawn = String(lanes.reduce((sum, lane) => sum + lane.boxes.length, 0));
  }
  function arrow(pen) {
    const lane = lanes.find((each) => each.boxes.includes(chosen));
    // From the thread that was at work when it was launched.
    const hosts = lanes.filter((each) => !each.onDevice);
    const host = hosts.find((each) => each.boxes.some((box) => box.from <= chosen.launch && chosen.launch <= box.from + box.length)) ?? hosts[0];
    if (!host) return;
    pen.strokeStyle = "#c8102e";
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(at(chosen.launch), host.top);
    const end = [at(chosen.from), lane.top + chosen.depth * BOX_HEIGHT];
    pen.bezierCurveTo(at(chosen.launch), end[1] - 20, end[0], host.top + 20, ...end);
    pen.stroke();
    pen.fillStyle = "#c8102e";
    pen.beginPath();
    pen.moveTo(end[0] - 4, end[1] - 7);
    pen.lineTo(end[0] + 4, end[1] - 7);
    pen.lineTo(...end);
    pen.fill();
  }
  function zoom(factor, around = (view.from + view.to) / 2) {
    const length = Math.min(span, Math.max(span / 1e6, (view.to - view.from) * factor));
    const share = (around - view.from) / (view.to - view.from);
    view.from = Math.min(Math.max(0, around - share * length), span - length);
    view.to = view.from + length;
    redraw();
  }
  function move(time) {
    const length = view.to - view.from;
    view.from = Math.min(Math.max(0, view.from + time), span - length);
    view.to = view.from + length;
    redraw();
  }
  function hit(x, y) {
    const time = timeAt(x);
    const slack = ((view.to - view.from) / width()) * 2;
    for (const lane of lanes) {
      const depth = Math.floor((y - lane.top) / BOX_HEIGHT);
      if (y < lane.top || depth < 0) continue;
      for (let place = firstIn(lane.boxes, time - lane.longest - slack); place < lane.boxes.length; place += 1) {
        const box = lane.boxes[place];
        if (box.from > time + slack) break;
        if (box.depth === depth && time <= box.from + Math.max(box.length, slack)) return box;
      }
      const gap = gaps.find((each) => lanes[each.lane] === lane && time >= each.from && time <= each.from + each.length && y < lane.bottom + 4);
      if (gap) return { name: `idle: ${gap.cause}`, told: unit(gap.length), from: gap.from, length: gap.length };
    }
    return null;
  }
  function tell(event) {
    const place = canvas.getBoundingClientRect();
    const box = hit(event.clientX - place.left, event.clientY - place.top);
    tip.hidden = !box;
    if (!box) return;
    tip.textContent = `${box.name}\n${box.told}`;
    const [x, y] = [event.clientX - place.left + 12, event.clientY - place.top + 34];
    tip.style.left = `${Math.max(0, Math.min(x, width() - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.min(y, height - 10)}px`;
  }
  const fingers = new Map();
  let dragged = 0;
  canvas.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event.clientX); dragged = 0; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return tell(event);
    const before = [...fingers.values()];
    const moved = event.clientX - fingers.get(event.pointerId);
    fingers.set(event.pointerId, event.clientX);
    dragged += Math.abs(moved);
    if (fingers.size === 2) {
      const after = [...fingers.values()];
      zoom(Math.max(4, Math.abs(before[0] - before[1])) / Math.max(4, Math.abs(after[0] - after[1])));
    } else move((-moved / width()) * (view.to - view.from));
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("click", (event) => {
    if (dragged > 4) return;
    const place = canvas.getBoundingClientRect();
    const box = hit(event.clientX - place.left, event.clientY - place.top);
    chosen = box;
    if (zoomOnClick && box) { view.from = box.from; view.to = Math.min(span, box.from + Math.max(box.length, span / 1e6)); }
    redraw();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) move((event.deltaX / width()) * (view.to - view.from));
    else zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.clientX - canvas.getBoundingClientRect().left));
    event.preventDefault();
  }, { passive: false });
  for (const [label, act] of [["+", () => zoom(0.5)], ["−", () => zoom(2)], ["←", () => move(-0.3 * (view.to - view.from))], ["→", () => move(0.3 * (view.to - view.from))], ["all", () => zoom(1e9)]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.setAttribute("aria-label", { "+": "zoom in", "−": "zoom out", "←": "earlier", "→": "later", all: "show all" }[label]);
    button.addEventListener("click", act);
    tools.append(button);
  }
  const causes = [...new Set(gaps.map((gap) => gap.cause))];
  for (const cause of causes) {
    const key = document.createElement("span");
    const dot = document.createElement("i");
    dot.style.background = GAP_COLOURS[cause] ?? "#8a94a3";
    key.append(dot, `idle: ${cause}`);
    tools.append(key);
  }
  new ResizeObserver(redraw).observe(canvas);
  draw();
  return { redraw, view };
}

function drawLanes(timeline, data) {
  const name = (number) => data.names[number];
  const rows = data.lanes.map((lane) => ({
    label: lane.label, onDevice: lane.on_device,
    boxes: lane.boxes.map(([number, from, length, depth, kind, launch]) => ({ name: name(number), from, length, depth, launch, told: `${kind}, ${microseconds(length)}${launch === null || launch === undefined ? "" : `; launched ${microseconds(from - launch)} before it ran`}` })),
  }));
  const gaps = data.gaps.map(([lane, from, length, cause]) => ({ lane, from, length, cause }));
  const bands = data.phases.map(([label, from, length]) => ({ name: label, from, length }));
  return [boxView(timeline, { rows, gaps, bands, span: data.span_us, unit: microseconds })];
}
