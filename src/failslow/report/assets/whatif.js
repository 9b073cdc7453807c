// Draws the what-if page: heat map, step times, and bars, from one block of JSON.
(function () {
  "use strict";
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const data = JSON.parse(document.getElementById("whatif-data").textContent);
  const ratio = (value) => value === null ? "" : "×" + value.toFixed(value < 9.995 ? 3 : 1);

  function layout(extra) {
    const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("rule"), tickcolor: css("rule"), automargin: true };
    const merged = Object.assign({
      margin: { l: 8, r: 16, t: 12, b: 8 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: css("muted") },
      hoverlabel: { bgcolor: css("card"), bordercolor: css("rule"), font: { color: css("ink"), size: 12 }, align: "left" },
    }, extra);
    merged.xaxis = Object.assign({}, axis, extra.xaxis);
    merged.yaxis = Object.assign({}, axis, extra.yaxis);
    return merged;
  }

  function heatMap() {
    const values = data.workers, flat = values.flat().filter((v) => v !== null);
    const top = Math.max(1.1, ...flat), few = flat.length <= 400;
    return [[{
      type: "heatmap", z: values, x: data.stages.map((s) => "stage " + s), y: data.dp_ranks.map((d) => "dp " + d),
      zmin: Math.min(1, ...flat), zmax: top, xgap: 2, ygap: values.length > 60 ? 0 : 2, hoverongaps: false,
      colorscale: [[0, css("healthy")], [0.35, css("card")], [1, css("slow")]],
      colorbar: { thickness: 12, outlinewidth: 0, tickprefix: "×", tickformat: ".2f", nticks: 5 },
      text: values.map((row) => row.map((v) => few && v !== null ? v.toFixed(2) : "")),
      texttemplate: few ? "%{text}" : undefined, textfont: { color: css("ink") },
      customdata: values.map((row, i) => row.map((v, j) => [ratio(v), data.ranks[i][j]])),
      hovertemplate: "%{y}, %{x} (rank %{customdata[1]})<br>%{customdata[0]}<extra></extra>",
    }], layout({ xaxis: { side: "top", showgrid: false }, yaxis: { autorange: "reversed", showgrid: false, nticks: 30 } })];
  }

  function stepTimes() {
    const line = (name, color, dash) => ({
      type: "scatter", mode: "lines+markers", name, x: data.steps.map(String), y: data[name + "_s"],
      marker: { size: 4, color: css(color) }, line: { width: 1.6, color: css(color), dash },
      hovertemplate: "step %{x}<br>" + name + " %{y:.4g} s<extra></extra>",
    });
    return [[line("measured", "line"), line("replayed", "slow"), line("ideal", "healthy", "dash")],
      layout({ xaxis: { title: { text: "step" }, type: "category", nticks: 12, showgrid: false },
        yaxis: { title: { text: "time of a step (s)" }, rangemode: "tozero" } })];
  }

  function bars(rows) {
    const shown = rows.slice(0, 24).reverse();
    return [[{
      type: "bar", orientation: "h", y: shown.map((r) => r[0]), x: shown.map((r) => r[1] - 1), base: 1,
      marker: { color: shown.map((r) => css(r[1] >= 1.1 ? "slow" : r[1] >= 1.02 ? "spike" : "course")) },
      text: shown.map((r) => ratio(r[1])), textposition: "outside", cliponaxis: false, hoverinfo: "skip",
    }], layout({ xaxis: { tickprefix: "×", nticks: 5 }, yaxis: { showgrid: false }, margin: { l: 8, r: 60, t: 12, b: 8 } })];
  }

  const pictures = {
    workers: heatMap, steps: stepTimes,
    stages: () => bars(data.by_stage), replicas: () => bars(data.by_dp), operations: () => bars(data.by_kind),
  };

  function draw() {
    document.querySelectorAll("[data-picture]").forEach((element) => {
      const [traces, frame] = pictures[element.dataset.picture]();
      Plotly.react(element, traces, frame, { responsive: true, displaylogo: false, displayModeBar: false });
    });
  }

  const darkNow = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.querySelector("button.theme").addEventListener("click", () => {
    root.dataset.theme = darkNow() ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
