// Draws the node × time map of a campaign of probes from one block of JSON.
(function () {
  "use strict";
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const data = JSON.parse(document.getElementById("probes-data").textContent);
  const element = document.querySelector('[data-picture="nodes"]');
  const stamp = (t) => new Date(t * 1e3).toISOString().slice(0, 19);
  const words = ["healthy", "slow, another node named", "slow, nobody named", "named"];

  function draw() {
    if (!element) return;
    const colors = ["healthy", "course", "spike", "slow"].map(css);
    // each level its own colour, with hard edges
    const colorscale = colors.flatMap((color, i) => [[i / 4, color], [(i + 1) / 4, color]]);
    const hover = data.cells.map((row, i) => row.map((level, j) => level === null ? "" :
      words[level] + (data.told[i][j] ? "<br>" + escape(data.told[i][j]).replace(/\n/g, "<br>") : "")));
    const axis = { gridcolor: css("grid"), zeroline: false, linecolor: css("rule"), tickcolor: css("rule"), automargin: true };
    Plotly.react(element, [{
      type: "heatmap", z: data.cells, x: data.edges_t.map(stamp), y: data.nodes, customdata: hover,
      zmin: -0.5, zmax: 3.5, colorscale, showscale: false, xgap: data.edges_t.length > 120 ? 0 : 1.5, ygap: data.nodes.length > 60 ? 0 : 2,
      hoverongaps: false, opacity: 0.85,
      hovertemplate: "%{y}, %{x|%Y-%m-%d %H:%M:%S}<br>%{customdata}<extra></extra>",
    }], {
      margin: { l: 8, r: 16, t: 12, b: 8 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("plain"),
      font: { family: "system-ui, sans-serif", size: 12, color: css("muted") },
      hoverlabel: { bgcolor: css("card"), bordercolor: css("rule"), font: { color: css("ink"), size: 12 }, align: "left" },
      xaxis: Object.assign({}, axis, { type: "date", showgrid: false, nticks: innerWidth < 640 ? 3 : 9 }),
      yaxis: Object.assign({}, axis, { type: "category", autorange: "reversed", showgrid: false, nticks: Math.min(data.nodes.length, 40) }),
    }, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  const darkNow = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.querySelector("button.theme").addEventListener("click", () => {
    root.dataset.theme = darkNow() ? "light" : "dark";
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
