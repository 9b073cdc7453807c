// Draws each job's chart from the numbers in its <script type="application/json"> block.
// Plotly does the drawing; this adds the switches, the theme, and labels that never collide.
(function () {
  "use strict";
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const number = (value) => Number(value).toLocaleString("en-US");
  const charts = [];

  function figures(value) {
    return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  }

  function duration(s) {
    if (s < 0.9995e-3) return figures(s * 1e6) + " µs";
    if (s < 0.9995) return figures(s * 1e3) + " ms";
    if (s < 59.95) return figures(s) + " s";
    const units = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
    for (const [size, unit, small, name] of units) {
      if (s >= size - small / 2) {
        const parts = Math.round(s / small), rest = parts % (size / small);
        return Math.floor(parts / (size / small)) + " " + unit + (rest ? " " + rest + " " + name : "");
      }
    }
    return figures(s) + " s";
  }

  // seconds are drawn in the unit in which a healthy iteration is a handy number
  function unitOf(seconds) {
    if (seconds < 1e-3) return [1e6, "µs"];
    if (seconds < 1) return [1e3, "ms"];
    if (seconds < 300) return [1, "s"];
    return [1 / 60, "min"];
  }

  function timeUnitOf(seconds) {
    if (seconds < 300) return [1, "s"];
    if (seconds < 3 * 3600) return [1 / 60, "min"];
    if (seconds < 4 * 86400) return [1 / 3600, "h"];
    return [1 / 86400, "days"];
  }

  class Chart {
    constructor(element) {
      this.element = element;
      this.data = JSON.parse(document.getElementById(element.dataset.source).textContent);
      this.axis = element.dataset.axis || "x";
      this.lanes = this.data.lanes || [];
      this.range = element.dataset.range || "fit";
      [this.scale, this.unit] = unitOf(this.data.healthy_s || 1);
      [this.timeScale, this.timeUnit] = timeUnitOf(Math.max(1e-9, ...this.everywhere("time")));
      this.drawn = false;
      this.settling = false;
      this.bind();
    }

    bind() {
      const card = this.element.closest(".card");
      card.querySelectorAll(".switch button").forEach((button) => {
        button.addEventListener("click", () => {
          this[button.dataset.set] = button.dataset.value;
          button.parentElement.querySelectorAll("button").forEach((other) =>
            other.setAttribute("aria-pressed", String(other === button)));
          this.draw();
        });
      });
      card.querySelectorAll("button.zoom").forEach((button) => {
        button.addEventListener("click", () => {
          const episode = this.data.episodes[Number(button.dataset.episode) - 1];
          const [low, high] = this.onAxis(episode), room = Math.max((high - low) * 0.6, 1e-9);
          Plotly.relayout(this.element, { "xaxis.range": [low - room, high + room] });
          this.element.scrollIntoView({ behavior: "smooth", block: "center" });
        });
      });
    }

    // a column of all that is drawn, line and spikes
    everywhere(name) {
      return this.data.line[name].concat(this.data.spikes[name]).filter((value) => value !== null);
    }

    onAxis(columns) {
      return this.axis === "time" ? columns.time.map((t) => t === null ? null : t * this.timeScale) : columns.x;
    }

    pointOnAxis(mark) {
      return this.axis === "time" ? mark.time * this.timeScale : mark.x;
    }

    hover(columns) {
      const healthy = this.data.healthy_s, start = this.data.start;
      return columns.y.map((y, i) => {
        if (y === null) return "";
        let text = "<b>step " + number(columns.step[i]) + "</b><br>" + duration(y) + " an iteration";
        if (healthy) text += " (×" + (y / healthy).toFixed(2) + " healthy)";
        if (columns.of[i] > 1) text += "<br>mean of " + number(columns.of[i]) + " iterations";
        text += "<br>" + duration(columns.time[i]) + " in";
        if (start !== null) text += ", " + new Date((start + columns.time[i]) * 1e3).toISOString().slice(0, 19).replace("T", " ");
        const x = columns.x[i];
        const inside = this.data.episodes.find((e) => x >= e.x[0] && x <= e.x[1]);
        if (inside) text += "<br>" + inside.what + " " + inside.number + ": " + escape(inside.label);
        if (columns.count && columns.count[i] > 1) text += "<br>the highest of " + columns.count[i] + " spikes here";
        return text;
      });
    }

    trace(columns, extra) {
      return Object.assign({
        type: "scatter", x: this.onAxis(columns), y: columns.y.map((y) => y === null ? null : y * this.scale),
        hoverinfo: "skip", connectgaps: false, showlegend: false,
      }, extra);
    }

    traces() {
      const d = this.data, few = d.records <= 400;
      const hasCourse = d.course.y.length > 0;
      const text = (columns) => ({ text: this.hover(columns), hoverinfo: "text" });
      return [
        this.trace(d.line, Object.assign(text(d.line), {
          mode: few ? "lines+markers" : "lines", marker: { size: 4, color: css("course") },
          line: { width: hasCourse ? 1 : 1.4, color: hasCourse ? css("line") : css("course") },
        })),
        this.trace(d.data, { mode: "lines", line: { width: 1.4, color: css("stall") } }),
        this.trace(d.course, { mode: "lines", line: { width: 2, color: css("course") } }),
        this.trace(d.healthy, { mode: "lines", line: { width: 1.6, color: css("healthy"), dash: "dash" } }),
        this.trace(d.spikes, Object.assign(text(d.spikes), {
          mode: "markers", marker: { size: 7, symbol: "circle-open", color: css("spike"), line: { width: 1.6 } },
        })),
        // what stands above the visible range is pinned to its top edge: nothing is hidden
        { type: "scatter", mode: "markers", x: [], y: [], text: [], hoverinfo: "text", showlegend: false, cliponaxis: false,
          marker: { size: 8, symbol: "triangle-up", color: css("spike") } },
        { type: "scatter", x: [], y: [], yaxis: "y2", hoverinfo: "skip", showlegend: false },
      ].concat(this.happened());
    }

    // what happened, in lanes under the course; and the levels an episode went through
    happened() {
      const d = this.data;
      if (!this.lanes.length) return [];
      const look = {
        watch: ["circle-open", "restart"], suspicion: ["triangle-up", "spike"], cleared: ["triangle-up-open", "spike"],
        diagnosis: ["diamond", "spike"], verdict: ["star", "slow"], pause: ["line-ns-open", "stall"],
        decision: ["square", "work"], action: ["circle", "healthy"], failed: ["x", "slow"],
      };
      const column = (pick) => d.marks.map(pick);
      return [
        this.trace(d.levels, { mode: "lines", line: { width: 2.2, color: css("slow") } }),
        {
          type: "scatter", mode: "markers", yaxis: "y3", showlegend: false, cliponaxis: false, hoverinfo: "text",
          x: column((m) => this.pointOnAxis(m)), y: column((m) => m.lane),
          text: column((m) => duration(m.time) + " in<br>" + escape(m.text)),
          marker: { size: 9, symbol: column((m) => look[m.kind][0]), color: column((m) => css(look[m.kind][1])), line: { width: 1.2, color: column((m) => css(look[m.kind][1])) } },
        },
        { // hover for the bars, which are shapes
          type: "scatter", mode: "markers", yaxis: "y3", showlegend: false, hoverinfo: "text", marker: { size: 14, opacity: 0 },
          x: d.spans.map((s) => { const [a, b] = this.onAxis(s); return (a + b) / 2; }), y: d.spans.map((s) => s.lane),
          text: d.spans.map((s) => escape(s.text) + "<br>" + duration(s.time[1] - s.time[0])),
        },
      ];
    }

    bars() {
      const colors = { pause: "stall", blind: "restart", S2: "healthy", S3: "course", S4: "work" };
      return (this.data.spans || []).map((span) => {
        const [x0, x1] = this.onAxis(span), color = css(colors[span.kind] || "line");
        return { type: "rect", xref: "x", yref: "y3", x0, x1, y0: span.lane - 0.32, y1: span.lane + 0.32,
          fillcolor: color, opacity: 0.55, line: { width: 1.5, color } };
      });
    }

    xRange() {
      const xs = this.axis === "time" ? this.everywhere("time").map((t) => t * this.timeScale) : this.everywhere("x");
      const low = Math.min(...xs), high = Math.max(...xs), room = (high - low) * 0.01 || 1;
      return [low - room, high + room];
    }

    yRange() {
      const ys = this.everywhere("y");
      const lowest = Math.min(...ys), highest = Math.max(...ys);
      const [low, high] = this.range === "fit" ? this.data.fit : [lowest, highest];
      if (this.range === "log") {
        const room = Math.max(Math.log10(highest / lowest) * 0.06, 0.02);
        return [Math.log10(lowest * this.scale) - room, Math.log10(highest * this.scale) + 2.5 * room];
      }
      const room = this.range === "fit" ? 0 : (highest - lowest) * 0.06;
      return [Math.max(0, low - room) * this.scale, (high + 2 * room) * this.scale];
    }

    shapes() {
      const bands = this.data.episodes.map((episode) => {
        const [x0, x1] = this.onAxis(episode), slow = episode.kind === "fail_slow";
        return { type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, layer: "below",
          fillcolor: css(slow ? "slow-soft" : "work-soft"), line: { width: 1, color: css(slow ? "slow-soft" : "work-soft") } };
      });
      const starts = this.data.restarts.map((mark) => ({ type: "line", xref: "x", yref: "paper",
        x0: this.pointOnAxis(mark), x1: this.pointOnAxis(mark), y0: 0, y1: 1,
        line: { width: 1.2, dash: "dot", color: css("restart") } }));
      return bands.concat(starts, this.bars());
    }

    layout() {
      const narrow = this.element.clientWidth < 620, log = this.range === "log";
      const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("rule"), tickcolor: css("rule"), automargin: true };
      const below = this.lanes.length ? Math.min(0.4, (this.lanes.length * 19 + 14) / Math.max(200, this.element.clientHeight - 120)) : 0;
      const stepTitle = this.data.unrolled ? "iterations, runs laid end to end" : "step";
      return {
        margin: { l: 8, r: narrow ? 8 : 44, t: this.data.episodes.length ? 66 : 40, b: 8 },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: "system-ui, sans-serif", size: narrow ? 11 : 12, color: css("muted") },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: css("muted"), activecolor: css("course") },
        hovermode: "closest", hoverdistance: 30, dragmode: narrow ? false : "zoom", showlegend: false,
        hoverlabel: { bgcolor: css("card"), bordercolor: css("rule"), font: { color: css("ink"), size: 12 }, align: "left" },
        xaxis: Object.assign({}, axis, {
          title: { text: this.axis === "time" ? "time since " + (this.data.began || "the log began") + " (" + this.timeUnit + ")" : stepTitle, standoff: 6 },
          range: this.xRange(), anchor: below ? "y3" : "y", nticks: narrow ? 5 : 10, tickformat: this.axis === "time" ? "~r" : ",~r", showgrid: false, showline: true,
        }),
        yaxis: Object.assign({}, axis, {
          title: { text: "time of an iteration (" + this.unit + ")", standoff: 4 },
          type: log ? "log" : "linear", range: this.yRange(), tickformat: log ? "~g" : ",~g", nticks: 7,
          dtick: log ? "D2" : undefined, domain: [below, 1],
        }),
        yaxis3: Object.assign({}, axis, {
          domain: [0, Math.max(0.01, below - 0.03)], range: [this.lanes.length - 0.4, -0.6], visible: below > 0, fixedrange: true,
          tickvals: this.lanes.map((_, i) => i), ticktext: this.lanes, tickfont: { size: narrow ? 9.5 : 11 }, showgrid: true,
        }),
        yaxis2: { overlaying: "y", side: "right", domain: [below, 1], type: log ? "log" : "linear", visible: !narrow && !!this.data.healthy_s,
          showgrid: false, zeroline: false, tickmode: log ? "linear" : "auto", tickprefix: "×", tickformat: "~g", nticks: 6,
          dtick: log ? "D2" : undefined, tickfont: { color: css("healthy") }, fixedrange: true },
        shapes: this.shapes(),
      };
    }

    draw() {
      this.settling = true;
      Plotly.react(this.element, this.traces(), this.layout(), {
        responsive: true, displaylogo: false, scrollZoom: false, doubleClick: "reset",
        modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
        toImageButtonOptions: { format: "png", scale: 2, filename: "failslow" },
      }).then(() => {
        if (!this.drawn) {
          this.drawn = true;
          this.element.on("plotly_relayout", () => this.settle());
        }
        this.settling = false;
        this.settle();
      });
    }

    // after every zoom or resize: labels, pinned markers and the ratio axis fit what is visible
    settle() {
      if (this.settling) return;
      this.settling = true;
      const full = this.element._fullLayout, axis = full.xaxis, y = full.yaxis;
      const ratio = this.data.healthy_s * this.scale;
      const y2 = y.type === "log" ? y.range.map((v) => v - Math.log10(ratio)) : y.range.map((v) => v / ratio);
      const pinned = this.pinned(axis, y);
      Plotly.update(this.element, { x: [pinned.x], y: [pinned.y], text: [pinned.text] },
        { annotations: this.labels(axis), "yaxis2.range": y2 }, [5]).then(() => { this.settling = false; });
    }

    pinned(axis, y) {
      const top = y.type === "log" ? Math.pow(10, y.range[1]) : y.range[1];
      const best = new Map();
      for (const columns of [this.data.line, this.data.spikes]) {
        const xs = this.onAxis(columns);
        for (let i = 0; i < xs.length; i++) {
          if (columns.y[i] === null || columns.y[i] * this.scale <= top) continue;
          if (xs[i] < axis.range[0] || xs[i] > axis.range[1]) continue;
          const column = Math.round(axis.l2p(xs[i]) / 7), other = best.get(column);
          if (!other || other.columns.y[other.i] < columns.y[i]) best.set(column, { columns, i, x: xs[i] });
        }
      }
      const marks = [...best.values()].sort((a, b) => a.x - b.x), picked = {};
      for (const name of ["step", "x", "time", "y", "of"]) picked[name] = marks.map((m) => m.columns[name][m.i]);
      return {
        x: marks.map((m) => m.x), y: marks.map(() => top),
        text: this.hover(picked).map((text) => text + "<br>above the visible range"),
      };
    }

    labels(axis) {
      const width = axis._length, rows = [[], [], []], made = [];
      const place = (left, right, first) => {
        for (let row = first; row < rows.length; row++) {
          if (rows[row].every(([a, b]) => right < a || left > b)) { rows[row].push([left, right]); return row; }
        }
        return -1;
      };
      const add = (x, text, row, color, hover, anchor) => made.push({
        x, xref: "x", y: 1, yref: "paper", yanchor: "bottom", yshift: 7 + row * 18, xanchor: anchor, showarrow: false,
        text, hovertext: hover, font: { size: 11.5, color }, align: "center" });
      // the costliest episodes choose their place first
      const order = this.data.episodes.slice().sort((a, b) => (b.iteration_s * (b.time[1] - b.time[0])) - (a.iteration_s * (a.time[1] - a.time[0])));
      for (const episode of order) {
        const [x0, x1] = this.onAxis(episode);
        if (x1 < axis.range[0] || x0 > axis.range[1]) continue;
        const p0 = Math.max(0, axis.l2p(x0)), p1 = Math.min(width, axis.l2p(x1)), middle = (p0 + p1) / 2;
        const color = css(episode.kind === "fail_slow" ? "slow" : "work");
        const prefix = episode.kind === "fail_slow" ? "" : "work ";
        for (const text of [prefix + episode.label, prefix + episode.short, String(episode.number)]) {
          const half = (text.length * 6.3 + 10) / 2, centre = Math.min(Math.max(middle, half), Math.max(width - half, half));
          const row = place(centre - half, centre + half, 0);
          if (row < 0) continue;
          add(axis.p2l(centre), escape(text), row, color, episode.number + ": " + escape(episode.what + " " + episode.label), "center");
          break;
        }
      }
      for (const mark of this.data.restarts) {
        const x = this.pointOnAxis(mark);
        if (x < axis.range[0] || x > axis.range[1]) continue;
        const text = "↻", p = axis.l2p(x), row = place(p - 8, p + 8, 0);
        if (row >= 0) add(x, text, row, css("restart"), escape(mark.note), "center");
      }
      return made;
    }
  }

  function drawSoon(chart) {
    if (!("IntersectionObserver" in window)) { chart.draw(); return; }
    const watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { watcher.disconnect(); chart.draw(); }
    }, { rootMargin: "600px" });
    watcher.observe(chart.element);
  }

  const redraw = () => charts.forEach((chart) => { if (chart.drawn) chart.draw(); });
  const darkNow = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.querySelector("button.theme").addEventListener("click", () => {
    root.dataset.theme = darkNow() ? "light" : "dark";
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => charts.forEach((chart) => { if (!chart.drawn) chart.draw(); }));
  document.querySelectorAll(".chart").forEach((element) => charts.push(new Chart(element)));
  charts.forEach(drawSoon);
})();
