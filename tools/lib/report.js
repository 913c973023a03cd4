"use strict";
// Adds to the pictures of the page: a cursor with values, zoom, curves that can be hidden, and news of a running run.
// Everything that it needs is in the element #data; without it the pictures are complete.
(() => {
  const SIZE = 1000;
  let model, view, cursor = null, hidden = {}, state = null;

  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const figures = () => all("figure.chart");

  function compact(value) {
    if (Math.abs(value) < 1000) return String(Number(value.toPrecision(3)));
    const power = Math.min(4, Math.floor(Math.log10(Math.abs(value)) / 3));
    return Number((value / 1000 ** power).toPrecision(3)) + ["", "K", "M", "B", "T"][power];
  }

  const byteUnit = value => Math.abs(value) >= 2 ** 30 ? 2 ** 30 : 2 ** 20;

  function text(value, unit) {
    if (value === null || !Number.isFinite(value)) return "none";
    if (unit === "percent") return Number((100 * value).toPrecision(3)) + "%";
    if (unit === "bytes") return Number((value / byteUnit(value)).toPrecision(4)) + (byteUnit(value) === 2 ** 30 ? " GiB" : " MiB");
    if (unit === "seconds") {
      return value >= 1 || value === 0 ? Number(value.toPrecision(3)) + " s" : Number((1000 * value).toPrecision(3)) + " ms";
    }
    return unit === "si" || Math.abs(value) >= 1e5 ? compact(value) : String(Number(value.toPrecision(4)));
  }

  // Multiples of 1, 2 or 5 times a power of ten, as in charts.py.
  function roundTicks(low, high, count) {
    const step = (high - low) / count, power = 10 ** Math.floor(Math.log10(step));
    const size = [1, 2, 5, 10].map(f => f * power).find(s => s >= step * 0.999), found = [];
    for (let n = Math.ceil(low / size - 1e-9); n <= Math.floor(high / size + 1e-9) && found.length < 50; n++) found.push(n * size);
    return found;
  }

  function valueTicks(low, high) {
    for (const count of [4, 5, 6]) if (roundTicks(low, high, count).length > 2) return roundTicks(low, high, count);
    return roundTicks(low, high, 8);
  }

  function logTicks(low, high) {
    let found = [];
    for (const factors of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]]) {
      found = [];
      for (let p = Math.floor(low); p <= Math.ceil(high); p++) for (const f of factors) found.push(f * 10 ** p);
      found = found.filter(v => Math.log10(v) >= low && Math.log10(v) <= high);
      if (found.length >= 3) break;
    }
    const each = Math.ceil(found.length / 6);
    return found.filter((_, n) => n % each === 0);
  }

  // Index of the last point at or before a place; -1 before the first.
  function before(xs, x) {
    let low = -1, high = xs.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return low;
  }

  function nearest(xs, x) {
    const at = before(xs, x);
    if (at < 0) return 0;
    return at + 1 < xs.length && xs[at + 1] - x < x - xs[at] ? at + 1 : at;
  }

  const chartOf = figure => model.charts.find(chart => "chart-" + chart.id === figure.id);
  const isHidden = (chart, number) => hidden[chart.id + ":" + number] === true;

  // The vertical range of what is shown.
  function range(chart) {
    if (view[0] === model.x[0] && view[1] === model.x[1] && !chart.curves.some((_, n) => isHidden(chart, n))) return chart.y;
    let low = Infinity, high = -Infinity;
    chart.curves.forEach((curve, number) => {
      if (isHidden(chart, number)) return;
      for (let n = Math.max(0, before(curve.x, view[0])); n < curve.x.length && curve.x[n] <= view[1]; n++) {
        let value = curve.y[n];
        if (value === null || (chart.log && value <= 0)) continue;
        if (chart.log) value = Math.log10(value);
        low = Math.min(low, value); high = Math.max(high, value);
      }
    });
    if (low > high) return chart.y;
    if (chart.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 0.5;
    return [chart.zero && low === 0 ? 0 : low - room, high + room];
  }

  function draw(figure) {
    const chart = chartOf(figure);
    if (!chart) return;
    const [low, high] = range(chart), [left, right] = view, whole = model.x[1] - model.x[0];
    const height = value => SIZE * (1 - (value - chart.y[0]) / (chart.y[1] - chart.y[0]));
    const x = SIZE * (left - model.x[0]) / whole, width = SIZE * (right - left) / whole;
    const svg = figure.querySelector(".plot > svg");
    svg.setAttribute("viewBox", [x, height(high), width, height(low) - height(high)].join(" "));
    all(".mark", svg).forEach(mark => mark.setAttribute("d", mark.getAttribute("d").replace(/ .*/, " " + height(high) + "V" + height(low))));
    const size = chart.unit === "bytes" ? byteUnit(high) : 1;
    const ticks = chart.log ? logTicks(low, high) : valueTicks(low / size, high / size).map(tick => size * tick);
    const shown = value => chart.log ? Math.log10(value) : value;
    svg.querySelector(".grid").innerHTML = ticks.map(t => `<path d="M0 ${height(shown(t))}H${SIZE}"/>`).join("");
    const label = (place, side, words) => `<span style="${side}:${place}%">${words}</span>`;
    figure.querySelector(".plot .y").innerHTML =
      ticks.map(t => label(100 * (high - shown(t)) / (high - low), "top", text(t, chart.unit))).join("");
    figure.querySelector(".plot .x").innerHTML =
      roundTicks(left, right, 5).map(t => label(100 * (t - left) / (right - left), "left", compact(t))).join("");
    all(".flags > *", figure).forEach(flag => {
      const place = (Number(flag.dataset.x) - left) / (right - left);
      flag.style.left = 100 * place + "%";
      flag.classList.toggle("hidden", place < 0 || place > 1);
    });
    all(".curve", svg).forEach(path => path.classList.toggle("hidden", isHidden(chart, path.dataset.curve)));
    all("input[data-curve]", figure).forEach(input => { input.checked = !isHidden(chart, input.dataset.curve); });
  }

  function zoom(left, right) {
    const whole = model.x[1] - model.x[0], width = Math.min(whole, Math.max(right - left, whole / 5000));
    left = Math.min(Math.max(left, model.x[0]), model.x[1] - width);
    view = width >= whole ? [...model.x] : [left, left + width];
    figures().forEach(draw);
    point(cursor);
  }

  // Move the cursor of all charts to a place, or remove it.
  function point(x, on = null) {
    cursor = x;
    figures().forEach(figure => {
      const chart = chartOf(figure), plot = figure.querySelector(".plot");
      let line = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
      if (x === null || x < view[0] || x > view[1]) {
        if (line) { line.remove(); tip.remove(); }
        all("[data-value]", figure).forEach(output => {
          const values = chart.curves[output.dataset.value].y.filter(y => y !== null);
          output.textContent = text(values[values.length - 1], chart.unit);
        });
        return;
      }
      if (!line) {
        line = plot.appendChild(document.createElement("div")); line.className = "cursor";
        tip = plot.appendChild(document.createElement("div")); tip.className = "tip";
      }
      const place = (x - view[0]) / (view[1] - view[0]);
      line.style.left = 100 * place + "%";
      tip.style.cssText = place > 0.5 ? `right:calc(${100 * (1 - place)}% + 6px)` : `left:calc(${100 * place}% + 6px)`;
      tip.textContent = compact(x) + " " + model.axis;
      tip.classList.toggle("hidden", on !== null && on !== figure);
      all("[data-value]", figure).forEach(output => {
        const curve = chart.curves[output.dataset.value];
        output.textContent = text(curve.y[nearest(curve.x, x)], chart.unit);
      });
    });
  }

  const placeOf = (plot, event) => {
    const box = plot.getBoundingClientRect();
    return view[0] + (view[1] - view[0]) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };

  function listen(figure) {
    const plot = figure.querySelector(".plot"), chart = chartOf(figure);
    let from = null, brush = null;
    plot.addEventListener("pointerdown", event => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      from = placeOf(plot, event);
      brush = plot.appendChild(document.createElement("div")); brush.className = "brush";
      plot.setPointerCapture(event.pointerId);
      event.preventDefault(); figure.focus();
    });
    plot.addEventListener("pointermove", event => {
      const x = placeOf(plot, event);
      point(x, figure);
      if (brush) {
        const ends = [from, x].sort((a, b) => a - b).map(p => 100 * (p - view[0]) / (view[1] - view[0]));
        brush.style.cssText = `left:${ends[0]}%;width:${ends[1] - ends[0]}%`;
      }
    });
    plot.addEventListener("pointerup", event => {
      if (!brush) return;
      const ends = [from, placeOf(plot, event)].sort((a, b) => a - b);
      brush.remove(); brush = null;
      if (ends[1] - ends[0] > (view[1] - view[0]) / 100) zoom(...ends);
    });
    plot.addEventListener("pointercancel", () => { if (brush) brush.remove(); brush = null; });
    plot.addEventListener("pointerleave", () => { if (!brush) point(null); });
    plot.addEventListener("dblclick", () => zoom(...model.x));
    figure.addEventListener("keydown", event => {
      if (event.target !== figure) return;
      const width = view[1] - view[0], step = width / (event.shiftKey ? 10 : 100), middle = cursor ?? (view[0] + view[1]) / 2;
      const to = x => point(Math.min(view[1], Math.max(view[0], x)), figure);
      const keys = {
        ArrowLeft: () => to(middle - step), ArrowRight: () => to(middle + step), Home: () => to(view[0]), End: () => to(view[1]),
        "+": () => zoom(middle - width / 4, middle + width / 4), "=": () => zoom(middle - width / 4, middle + width / 4),
        "-": () => zoom(middle - width, middle + width), "0": () => zoom(...model.x), Escape: () => point(null),
      };
      if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
    });
    all("input[data-curve]", figure).forEach(input => input.addEventListener("change", () => {
      hidden[chart.id + ":" + input.dataset.curve] = !input.checked;
      draw(figure);
    }));
  }

  function start() {
    const atEnd = model && view[0] === model.x[0] && view[1] === model.x[1], old = view;
    model = JSON.parse(document.getElementById("data").textContent);
    document.documentElement.classList.add("scripted");
    view = old && !atEnd ? [Math.max(old[0], model.x[0]), Math.min(old[1], model.x[1])] : [...model.x];
    figures().forEach(listen);
    if (old) { figures().forEach(draw); point(cursor); }
  }

  // A page that is served asks for news; one that was opened from a file does not.
  async function refresh(badge) {
    try {
      const answer = await fetch("state.json" + (state ? "?after=" + encodeURIComponent(state) : ""), { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const news = await answer.json();
      if (news.body !== undefined) {
        const open = all("details").map(each => each.open), focused = document.activeElement && document.activeElement.id;
        const top = window.scrollY;
        document.getElementById("report").innerHTML = news.body;
        all("details").forEach((each, n) => { if (n < open.length) each.open = open[n]; });
        start();
        if (focused && document.getElementById(focused)) document.getElementById(focused).focus({ preventScroll: true });
        window.scrollTo(0, top);
      }
      state = news.state;
      badge.textContent = "live, read at " + news.time;
    } catch (error) {
      badge.textContent = "not connected: " + error.message;
    }
    setTimeout(() => refresh(badge), 2000);
  }

  start();
  if (location.protocol.startsWith("http")) {
    const badge = document.body.appendChild(document.createElement("div"));
    badge.className = "live"; badge.setAttribute("role", "status"); badge.textContent = "live";
    state = document.getElementById("report").dataset.state;
    refresh(badge);
  }
})();
