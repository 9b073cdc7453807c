// Draws the pictures of a watched job beside its timeline: heat maps of profiles and own times,
// the link matrix, and telemetry around each onset; all from one block of JSON.
(function () {
  "use strict";
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const block = document.getElementById("story-data");
  if (!block) return;
  const data = JSON.parse(block.textContent);
  const drawn = [];

  const clock = (t) => new Date(t * 1e3).toISOString().slice(11, 19);
  const ratio = (v) => "×" + v.toFixed(v < 9.995 ? 2 : 0);
  const figures = (v) => Math.abs(v) >= 99.95 ? v.toFixed(0) : Math.abs(v) >= 9.995 ? v.toFixed(1) : v.toFixed(2);
  function seconds(s) {
    if (Math.abs(s) < 0.9995e-3) return figures(s * 1e6) + " µs";
    return Math.abs(s) < 0.9995 ? figures(s * 1e3) + " ms" : figures(s) + " s";
  }

  function layout(extra) {
    const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("rule"), tickcolor: css("rule"), automargin: true };
    const merged = Object.assign({
      margin: { l: 8, r: 8, t: 10, b: 8 }, showlegend: false, dragmode: innerWidth < 640 ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: innerWidth < 640 ? 11 : 12, color: css("muted") },
      hoverlabel: { bgcolor: css("card"), bordercolor: css("rule"), font: { color: css("ink"), size: 12 }, align: "left" },
    }, extra);
    for (const name of Object.keys(merged)) if (/^[xy]axis\d*$/.test(name)) merged[name] = Object.assign({}, axis, merged[name]);
    if (!merged.xaxis) merged.xaxis = axis;
    if (!merged.yaxis) merged.yaxis = axis;
    return merged;
  }

  // how far from like: under 1 bluish, about 1 plain, from a tenth over 1 warmer and warmer
  function scale(span) {
    const one = 0.5 / (span + 0.5), from = (v) => Math.min(1, Math.max(0, (v - 0.5) / (span + 0.5)));
    return {
      zmin: 0.5, zmax: 1 + span,
      colorscale: [[0, css("course")], [one * 0.8, css("plain")], [from(1.06), css("plain")], [from(1.06 + span * 0.45), css("spike")], [1, css("slow")]],
      colorbar: { thickness: 10, outlinewidth: 0, tickprefix: "×", tickformat: ".2~f", nticks: 5, len: 1, lenmode: "fraction" },
      hoverongaps: false,
    };
  }

  function plot(element, traces, extra) {
    Plotly.react(element, traces, layout(extra), {
      responsive: true, displayModeBar: false, doubleClick: "reset",
    });
  }

  // many workers are folded to their nodes: of each node the worst worker is shown
  function folded(ranks, nodes, rows) {
    const places = new Map();
    ranks.forEach((rank, i) => {
      const node = nodes[i] || "rank " + rank;
      if (!places.has(node)) places.set(node, []);
      places.get(node).push(i);
    });
    return [...places].map(([node, members]) => ({
      name: node,
      cells: rows[0].map((_, j) => {
        let worst = null;
        for (const i of members) {
          const v = rows[i][j];
          if (v !== null && (worst === null || v > worst.v)) worst = { v, rank: ranks[i] };
        }
        return worst;
      }),
    }));
  }

  function single(ranks, nodes, rows) {
    return ranks.map((rank, i) => ({
      name: "rank " + rank, node: nodes[i],
      cells: rows[i].map((v) => v === null ? null : { v, rank }),
    }));
  }

  const pictures = {
    profiles(element, chosen) {
      const round = data.rounds[chosen.round === undefined ? data.rounds.length - 1 : chosen.round];
      const metric = round.values[chosen.metric] ? chosen.metric : "own", late = metric === "late";
      const by = chosen.by === "node" ? folded : single;
      const items = by(round.ranks, round.nodes, round.values[metric]);
      const kept = round.columns.map((_, j) => j).filter((j) => items.some((item) => item.cells[j] !== null));
      const columns = kept.map((j) => round.columns[j]), few = items.length <= (innerWidth < 640 ? 6 : 16);
      const shown = (v) => late ? "+" + seconds(v) : ratio(v);
      const z = kept.map((j) => items.map((item) => item.cells[j] === null ? null : late ? 1 + item.cells[j].v / round.iteration_s : item.cells[j].v));
      const top = Math.max(0.5, Math.min(2, Math.max(...z.flat().filter((v) => v !== null)) - 1));
      element.style.height = Math.max(150, 84 + 30 * columns.length) + "px";
      plot(element, [Object.assign({
        type: "heatmap", z, y: columns, x: items.map((item) => item.name), xgap: items.length > 160 ? 0 : 1.5, ygap: 2,
        text: kept.map((j) => items.map((item) => few && item.cells[j] !== null ? shown(item.cells[j].v) : "")),
        texttemplate: few ? "%{text}" : undefined, textfont: { color: css("ink"), size: 11 },
        customdata: kept.map((j) => items.map((item) => item.cells[j] === null ? ["", ""] : [shown(item.cells[j].v), (item.node ? item.name + " on " + item.node : item.name + ", worst rank " + item.cells[j].rank)])),
        hovertemplate: "%{customdata[1]}<br>%{y}: %{customdata[0]}<extra></extra>",
      }, scale(top), late ? { showscale: false } : {})], {
        xaxis: { type: "category", showgrid: false, nticks: innerWidth < 640 ? 5 : 17, tickangle: 0 },
        yaxis: { type: "category", autorange: "reversed", showgrid: false, fixedrange: true },
      });
    },

    own(element, chosen) {
      const own = data.own, by = chosen.by === "node" ? folded : single;
      const rows = own.percent.map((row) => row.map((v) => v === null ? null : v / 100));
      const items = by(own.ranks, own.nodes, rows), x = own.t.map((t) => new Date(t * 1e3).toISOString().slice(0, 19));
      const top = Math.max(0.5, Math.min(2, own.highest - 1));
      element.style.height = Math.min(620, Math.max(150, 70 + items.length * (items.length > 40 ? 4 : 24))) + "px";
      plot(element, [Object.assign({
        type: "heatmap", z: items.map((item) => item.cells.map((c) => c && c.v)), x, y: items.map((item) => item.name),
        customdata: items.map((item) => item.cells.map((c) => c ? ratio(c.v) + (item.node === undefined ? ", worst rank " + c.rank : "") : "")),
        ygap: items.length > 40 ? 0 : 2,
        hovertemplate: "%{y} at %{x|%H:%M:%S}<br>own time %{customdata}<extra></extra>",
      }, scale(top))], {
        xaxis: { type: "date", showgrid: false, nticks: innerWidth < 640 ? 3 : 9 },
        yaxis: { type: "category", autorange: "reversed", showgrid: false, nticks: items.length > 40 ? 20 : items.length },
        shapes: own.spans.map(([a, b]) => ({ type: "rect", xref: "x", yref: "paper", y0: 0, y1: 1, fillcolor: "rgba(0,0,0,0)",
          x0: new Date(a * 1e3).toISOString().slice(0, 19), x1: new Date(b * 1e3).toISOString().slice(0, 19), line: { width: 1.5, color: css("slow"), dash: "dot" } })),
      });
    },

    links(element, chosen) {
      const sizes = data.links.sizes, size = sizes[chosen.size === undefined ? sizes.length - 1 : chosen.size];
      const names = size.nodes, few = names.length <= (innerWidth < 640 ? 5 : 14);
      const z = names.map(() => names.map(() => null)), text = names.map(() => names.map(() => "")), hover = names.map(() => names.map(() => ""));
      for (const [from, to, times, label, detail] of size.cells) { z[from][to] = times; text[from][to] = few ? label : ""; hover[from][to] = detail; }
      const top = Math.max(0.5, Math.min(2, Math.max(...size.cells.map((c) => c[2])) - 1));
      element.style.height = Math.min(760, Math.max(220, 110 + names.length * (few ? 34 : 8))) + "px";
      plot(element, [Object.assign({
        type: "heatmap", z, x: names, y: names, text, texttemplate: few ? "%{text}" : undefined, textfont: { color: css("ink"), size: 11 },
        customdata: hover, xgap: few ? 2 : 0, ygap: few ? 2 : 0,
        hovertemplate: "%{y} → %{x}<br>%{customdata}<extra></extra>",
      }, scale(top))], {
        xaxis: { type: "category", side: "top", showgrid: false, title: { text: "to", standoff: 4 }, nticks: few ? names.length : 12 },
        yaxis: { type: "category", autorange: "reversed", showgrid: false, title: { text: "from", standoff: 4 }, nticks: few ? names.length : 20 },
      });
    },

    telemetry(element) {
      const shown = data.telemetry[Number(element.dataset.number)], rows = shown.panels.length;
      const traces = [], extra = { annotations: [], shapes: [], margin: { l: 8, r: 12, t: 6, b: 8 } };
      const date = (t) => new Date(t * 1e3).toISOString().slice(0, 23), height = 1 / rows;
      const line = (t, color) => extra.shapes.push({ type: "line", xref: "x", yref: "paper", x0: date(t), x1: date(t), y0: 0, y1: 1, line: { width: 1.4, dash: "dot", color: css(color) } });
      element.style.height = rows * 88 + 40 + "px";
      shown.panels.forEach((panel, i) => {
        const id = i ? String(i + 1) : "", top = 1 - i * height;
        traces.push({ type: "scatter", mode: "lines", x: panel.t.map(date), y: panel.y, yaxis: "y" + id, connectgaps: false,
          line: { width: 1.6, color: css(panel.telling ? "slow" : "course") },
          hovertemplate: "%{x|%H:%M:%S}<br>%{y:.4~g} " + escape(panel.unit) + "<extra>" + escape(panel.title) + "</extra>" });
        extra["yaxis" + id] = { domain: [top - height * 0.97 + 0.005, top - 20 / (rows * 88)], nticks: 3, rangemode: panel.zero ? "tozero" : "normal", tickformat: Math.max(...panel.y) >= 1e4 ? "~s" : "~g", fixedrange: true };
        extra.annotations.push({ xref: "paper", yref: "paper", x: 0, y: top, xanchor: "left", yanchor: "top", showarrow: false,
          text: "<b>" + escape(panel.title) + "</b>  " + escape(panel.change), font: { size: 11.5, color: css(panel.telling ? "slow" : "muted") } });
      });
      extra.xaxis = { type: "date", showgrid: false, anchor: "y" + (rows > 1 ? rows : ""), nticks: innerWidth < 640 ? 3 : 8 };
      line(shown.onset_t, "slow");
      if (shown.relief_t !== null) line(shown.relief_t, "healthy");
      plot(element, traces, extra);
    },
  };

  function start(element) {
    const chosen = Object.assign({}, element.dataset), picture = pictures[element.dataset.picture];
    const draw = () => picture(element, chosen);
    const card = element.closest(".card");
    card.querySelectorAll("select[data-set]").forEach((select) => select.addEventListener("change", () => { chosen[select.dataset.set] = Number(select.value); draw(); }));
    if (element.dataset.picture !== "telemetry") {
      card.querySelectorAll(".switch button").forEach((button) => button.addEventListener("click", () => {
        chosen[button.dataset.set] = button.dataset.value;
        button.parentElement.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", String(other === button)));
        draw();
      }));
    }
    const first = () => { if (!drawn.includes(draw)) { drawn.push(draw); draw(); } };
    if (!("IntersectionObserver" in window)) { first(); return; }
    const watcher = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) { watcher.disconnect(); first(); }
    }, { rootMargin: "600px" });
    watcher.observe(element);
    addEventListener("beforeprint", first);
  }

  const redraw = () => drawn.forEach((draw) => draw());
  document.querySelector("button.theme").addEventListener("click", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.querySelectorAll("[data-picture]").forEach(start);
})();
