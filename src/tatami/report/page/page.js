"use strict";
const { charts, steps, native_bytes: nativeBytes } = JSON.parse(document.getElementById("data").textContent);
const ink = "currentColor";
const config = {
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: { labelColor: ink, titleColor: ink, domainColor: ink, tickColor: ink, gridColor: ink, gridOpacity: 0.14,
    labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelOverlap: "greedy", labelSeparation: 8 },
  legend: { labelColor: ink, titleColor: ink, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
};
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const views = [];

function show() {
  const slider = document.getElementById("step");
  if (!slider) return;
  const number = Number(slider.value);
  const step = steps[number];
  const replicas = `${step.replicas} replica${step.replicas === 1 ? "" : "s"}`;
  const laid = step.stages ? `${step.stages} stages of ${replicas}` : `${step.tiles} tile${step.tiles === 1 ? "" : "s"} in ${replicas}`;
  const told = `${number + 1} of ${steps.length}, after iteration ${step.iteration}: ${laid}${step.why && `; ${step.why}`}`;
  document.getElementById("told").textContent = told;
  slider.setAttribute("aria-valuetext", told);
  const note = document.getElementById("native");
  if (note) {
    note.hidden = !nativeBytes[number];
    note.textContent = `Sums that the communication library makes itself send at least ${nativeBytes[number].toLocaleString("en")} bytes more in an iteration; which links they take is not known.`;
  }
  for (const view of views) view.signal("step", number).runAsync();
}

async function draw() {
  for (const [name, spec] of Object.entries(charts)) {
    const options = { renderer: "svg", actions: false, config, tooltip: { theme: dark ? "dark" : "light" } };
    const { view } = await vegaEmbed(document.getElementById(name), spec, options);
    if (spec.params) views.push(view);
  }
  show();
  document.documentElement.dataset.drawn = Object.keys(charts).length;
}

document.getElementById("step")?.addEventListener("input", show);
draw();
