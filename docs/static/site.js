"use strict";
// Blocks of code get a button that copies them; of a console block, the commands. Tables drawn with characters are not wrapped.
addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const text = block.querySelector("pre").textContent;
    if (/[\u2500-\u259f]/.test(text)) block.querySelector("pre").classList.add("drawn");
    const lines = text.replaceAll("\\\n", "\\\u0000").split("\n");
    const commands = lines.filter(line => line.startsWith("$ ")).map(line => line.slice(2).replaceAll("\u0000", "\n"));
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(commands.length ? commands.join("\n") + "\n" : text);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.append(button);
  }
});
