// The pipeline as a Gantt chart: a row for each stage, time to the right, bubbles hatched. Draws; fetches nothing.

export const WINDOW_S = 10;

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: of("ink"), soft: of("soft"), line: of("line"), prefill: of("prefill"), decode: of("decode"), bubble: of("bubble") };
}

// A canvas's context in CSS pixels, sharp on every screen.
export function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  const tall = height || canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return [context, width, tall];
}

// Idle time of a stage between two steps, while the pipeline had work: [from, to] pairs.
export function bubbles([, , , before], [, , , after, rested], stage) {
  const ended = before[stage][1], started = after[stage][0];
  const idle = rested ? [[ended, before.at(-1)[1]], [after[0][0], started]] : [[ended, started]];
  return idle.filter(([from, to]) => to > from);
}

function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.globalAlpha = .8;
  for (const shift of [-6, 0, 6]) { pen.beginPath(); pen.moveTo(shift, 6); pen.lineTo(shift + 6, 0); pen.stroke(); }
  return context.createPattern(tile, "repeat");
}

// `steps`: [number, prefill, decode, spans, rested before] in order; `now` is the right edge, in seconds of the server's clock.
export function drawGantt(canvas, steps, stages, now) {
  const row = stages > 4 ? 22 : 30, gap = 6, left = 30, axis = 20;
  const [context, width, height] = surface(canvas, stages * (row + gap) + axis);
  const colour = colours(), start = now - WINDOW_S, scale = (width - left) / WINDOW_S;
  const x = (time) => left + (time - start) * scale;
  const pattern = hatch(context, colour.bubble);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.strokeStyle = colour.line;
  context.fillStyle = colour.soft;
  context.textAlign = "center";
  for (let ago = 2; ago < WINDOW_S; ago += 2) {
    context.beginPath();
    context.moveTo(x(now - ago), 0);
    context.lineTo(x(now - ago), height - axis + 3);
    context.stroke();
    context.fillText(`-${ago} s`, x(now - ago), height - axis / 2);
  }
  context.textAlign = "right";
  context.fillText("now", width, height - axis / 2);
  context.textAlign = "left";
  for (let stage = 0; stage < stages; stage++) {
    const top = stage * (row + gap) + gap / 2;
    context.fillStyle = colour.soft;
    context.fillText(`${stage}`, 10, top + row / 2);
    context.fillStyle = colour.line;
    context.globalAlpha = .45;
    context.fillRect(left, top, width - left, row);
    context.globalAlpha = 1;
  }
  context.save();
  context.beginPath();
  context.rect(left, 0, width - left, height - axis);
  context.clip();
  steps.forEach((step, index) => {
    const [, prefill, , spans] = step;
    for (let stage = 0; stage < stages; stage++) {
      const top = stage * (row + gap) + gap / 2, [from, to] = spans[stage];
      if (index) {
        context.fillStyle = pattern;
        for (const [idle, until] of bubbles(steps[index - 1], step, stage)) {
          if (until > start) context.fillRect(x(idle), top, Math.max(1, (until - idle) * scale), row);
        }
      }
      if (to < start) continue;
      context.fillStyle = prefill ? colour.prefill : colour.decode;
      context.fillRect(x(from), top, Math.max(1, (to - from) * scale - .75), row);
    }
  });
  context.restore();
}
