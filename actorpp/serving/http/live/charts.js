// Two small charts over the last minutes: lines for rates, dots for times to the first token. Draws; fetches nothing.

import { colours, surface } from "./gantt.js";

export const HISTORY_S = 300;
const PAD = { left: 40, right: 6, top: 8, bottom: 20 };

function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value);
}

function label(value) {
  if (value >= 1000) return `${+(value / 1000).toPrecision(2)}k`;
  return `${+value.toPrecision(2)}`;
}

function frame(canvas, top, now) {
  const [context, width, height] = surface(canvas), colour = colours();
  const x = (time) => PAD.left + (1 + (time - now) / HISTORY_S) * (width - PAD.left - PAD.right);
  const y = (value) => height - PAD.bottom - (value / top) * (height - PAD.top - PAD.bottom);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colour.soft;
  context.strokeStyle = colour.line;
  for (const value of [0, top / 2, top]) {
    context.beginPath();
    context.moveTo(PAD.left, y(value));
    context.lineTo(width - PAD.right, y(value));
    context.stroke();
    context.textAlign = "right";
    context.fillText(label(value), PAD.left - 6, y(value));
  }
  context.textAlign = "center";
  for (const minutes of [4, 3, 2, 1]) context.fillText(`${-minutes} min`, x(now - 60 * minutes), height - 7);
  context.textAlign = "left";
  context.beginPath();
  context.rect(PAD.left, 0, width - PAD.left, height);
  context.save();
  context.clip();
  return [context, x, y, colour];
}

// `rates`: [second, prompt tokens, output tokens] in order; a second that is missing had none.
export function drawRates(canvas, rates, now) {
  const known = new Map(rates.map((rate) => [rate[0], rate]));
  const seconds = [];
  for (let second = Math.floor(now) - HISTORY_S; second < Math.floor(now); second++) seconds.push(known.get(second) || [second, 0, 0]);
  const top = niceTop(Math.max(...seconds.map((rate) => Math.max(rate[1], rate[2]))));
  const [context, x, y, colour] = frame(canvas, top, now);
  for (const [at, name] of [[1, "prefill"], [2, "decode"]]) {
    context.beginPath();
    seconds.forEach((rate, index) => context[index ? "lineTo" : "moveTo"](x(rate[0] + .5), y(rate[at])));
    context.strokeStyle = colour[name];
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(seconds[seconds.length - 1][0] + .5), y(0));
    context.lineTo(x(seconds[0][0] + .5), y(0));
    context.globalAlpha = .12;
    context.fillStyle = colour[name];
    context.fill();
    context.globalAlpha = 1;
  }
  context.restore();
}

// `entries`: [when, seconds].
export function drawTtfts(canvas, entries, now) {
  const shown = entries.filter(([when]) => when > now - HISTORY_S);
  const [context, x, y, colour] = frame(canvas, niceTop(Math.max(0, ...shown.map(([, seconds]) => seconds))), now);
  context.fillStyle = colour.prefill;
  for (const [when, seconds] of shown) {
    context.globalAlpha = .85;
    context.beginPath();
    context.arc(x(when), y(seconds), 3, 0, 2 * Math.PI);
    context.fill();
  }
  context.globalAlpha = 1;
  context.restore();
}
