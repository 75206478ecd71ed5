(function (root) {
  const data = JSON.parse(root.querySelector(".data").textContent), rows = data.rows.length, columns = data.columns.length;
  const bytes = Uint8Array.from(atob(data.tiles), c => c.charCodeAt(0)), size = rows * columns;
  const large = root.querySelector(".large"), said = root.querySelector(".said"), small = root.querySelectorAll(".panel");
  let chosen = 0, at = null;
  const style = name => getComputedStyle(root).getPropertyValue(name).trim();
  const rgb = color => [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16));
  const value = (panel, i) => {
    const q = bytes[panel * size + i];
    if (!data.signed) return data.limit * (q / 255) ** 2;
    const t = (q - 128) / 127;
    return data.limit * t * Math.abs(t);
  };
  function tile(panel) {
    const canvas = document.createElement("canvas"), low = rgb(style("--page")), high = rgb(style("--accent")), other = rgb(style("--below"));
    canvas.width = columns;
    canvas.height = rows;
    const image = new ImageData(columns, rows);
    for (let i = 0; i < size; i++) {
      const q = bytes[panel * size + i], t = data.signed ? (q - 128) / 127 : q / 255, end = t < 0 ? other : high;
      const part = t ? 0.08 + 0.92 * Math.min(1, Math.abs(t)) : 0; // a small value is not blank
      for (let k = 0; k < 3; k++) image.data[4 * i + k] = low[k] + (end[k] - low[k]) * part;
      image.data[4 * i + 3] = 255;
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }
  function paint(canvas, panel, width, labels) {
    const ratio = window.devicePixelRatio || 1, inner = (width - labels) / columns, shows = labels && inner >= 10;
    const cell = data.words ? Math.max(inner, 44) : shows || !labels ? inner : width / columns, high = data.words ? 26 : cell;
    const left = shows || (labels && data.words) ? labels : 0, top = left, across = left + columns * cell, down = top + rows * high;
    canvas.width = across * ratio;
    canvas.height = down * ratio;
    canvas.style.width = across + "px";
    canvas.style.height = down + "px";
    const draw = canvas.getContext("2d");
    draw.scale(ratio, ratio);
    draw.imageSmoothingEnabled = cell < 1;
    draw.drawImage(tile(panel), left, top, columns * cell, rows * high);
    draw.fillStyle = style("--ink");
    draw.font = Math.min(12, Math.max(8, Math.min(high, cell) - 1)) + "px system-ui, sans-serif";
    draw.textBaseline = "middle";
    draw.textAlign = "right";
    if (left) data.rows.forEach((word, i) => draw.fillText(word, left - 4, top + (i + 0.5) * high, left - 6));
    draw.textAlign = "left";
    if (top) data.columns.forEach((word, j) => {
      draw.save();
      draw.translate(left + (j + 0.5) * cell, top - 4);
      draw.rotate(-Math.PI / 2);
      draw.fillText(word, 0, 0, top - 6);
      draw.restore();
    });
    if (data.words && cell >= 30) {
      draw.textAlign = "center";
      data.words.forEach((word, i) => {
        const q = bytes[panel * size + i];
        draw.fillStyle = style(q > 150 ? "--page" : "--ink");
        draw.fillText(word, left + (i % columns + 0.5) * cell, top + (Math.floor(i / columns) + 0.5) * high, cell - 2);
      });
    }
    canvas.place = [left, top, cell, high];
  }
  function say() {
    if (!at) return;
    const [i, j] = at, k = i * columns + j, word = data.words ? ": " + data.words[k] : "";
    said.textContent = `${data.panels[chosen]}: ${data.rows[i]} (${i}), ${data.columns[j]} (${j})${word}: ${data.what} ${value(chosen, k).toPrecision(3)}`;
  }
  function show() {
    const width = large.parentElement.clientWidth;
    paint(large, chosen, Math.min(width, data.words ? width : 720), 84);
    small.forEach((button, i) => button.setAttribute("aria-pressed", i === chosen));
    say();
  }
  function all() {
    small.forEach((button, i) => paint(button.querySelector("canvas"), i, 144, 0));
    show();
  }
  large.addEventListener("pointermove", event => {
    const box = large.getBoundingClientRect(), [left, top, cell, high] = large.place;
    const j = Math.floor((event.clientX - box.left - left) / cell), i = Math.floor((event.clientY - box.top - top) / high);
    if (i >= 0 && i < rows && j >= 0 && j < columns) { at = [i, j]; say(); }
  });
  small.forEach((button, i) => button.addEventListener("click", () => { chosen = i; show(); }));
  window.addEventListener("resize", show);
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", all);
  all();
})(document.currentScript.parentElement);
