// The live page: follows the server's events, keeps what the charts need, sends prompts.

import { bubbles, drawGantt, WINDOW_S } from "./gantt.js";
import { drawRates, drawTtfts, HISTORY_S } from "./charts.js";

const $ = (id) => document.getElementById(id);
const still = matchMedia("(prefers-reduced-motion: reduce)");
const state = { about: null, newest: null, steps: [], rates: [], firstTokens: [], offset: 0, chartsAt: 0, drawnAt: 0 };

const seconds = (value) => value == null ? "–" : value >= 60 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : value >= 1 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(1000 * value)} ms`;
const bytes = (value) => value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : value >= 2 ** 20 ? `${Math.round(value / 2 ** 20)} MiB` : `${Math.ceil(value / 2 ** 10)} KiB`;
const count = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(100 * value)}%`;
const clock = () => performance.now() / 1000 + state.offset; // the server's

// --- events ---

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const frames = text.split("\n\n");
    text = frames.pop();
    for (const frame of frames) {
      const event = { name: "message", data: "" };
      for (const line of frame.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        if (line.startsWith("data: ")) event.data = line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

async function follow() {
  for (let wait = 500; ; wait = Math.min(2 * wait, 5000)) {
    try {
      const response = await fetch("live/events");
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      for await (const event of eventsOf(response)) {
        wait = 500;
        if (event.name === "about") begin(JSON.parse(event.data));
        else take(JSON.parse(event.data));
      }
    } catch (error) { /* said below: the server is away */ }
    show("bad", "server away, trying again");
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function show(kind, text) {
  $("dot").className = `dot ${kind}`;
  $("status").textContent = text;
}

function begin(about) {
  Object.assign(state, { about, steps: [], rates: [], firstTokens: [], newest: null });
  $("model").textContent = `${about.model} · context ${count(about.context_length)} · ${about.stages.length} stage${about.stages.length > 1 ? "s" : ""}`;
  document.title = `${about.model} – actorpp`;
  $("chat").checked = about.chat;
  $("chat").disabled = !about.chat;
  $("stages").replaceChildren(...about.stages.map((stage, index) => {
    const card = document.createElement("article");
    card.className = "stage";
    card.innerHTML = `<h3>Stage ${index}<span></span></h3><div class="bar split"><span class="busy"></span><span class="bubble"></span></div>
      <dl><dt>busy</dt><dd class="share"></dd><dt>bubbles</dt><dd class="idle"></dd><dt>queue</dt><dd class="queue"></dd><dt>weights</dt><dd class="weights"></dd><dt>KV pages</dt><dd class="pages"></dd><dt>restarts</dt><dd class="restarts"></dd></dl>`;
    card.querySelector(".queue").title = "steps that waited in the stage at its last heartbeat";
    card.querySelector("h3 span").textContent = stage.layers[1] - stage.layers[0] > 1 ? `layers ${stage.layers[0]}–${stage.layers[1] - 1}` : `layer ${stage.layers[0]}`;
    card.querySelector(".weights").textContent = bytes(stage.weight_bytes);
    card.querySelector(".pages").textContent = bytes(stage.kv_bytes);
    return card;
  }));
}

function take(snapshot) {
  const offset = snapshot.now - performance.now() / 1000;
  state.offset = state.newest ? Math.max(state.offset, offset) : offset; // the least delayed event knows best
  state.newest = snapshot;
  state.steps.push(...snapshot.steps);
  const oldest = snapshot.now - WINDOW_S - 2;
  while (state.steps.length && state.steps[0][3].at(-1)[1] < oldest) state.steps.shift();
  if (snapshot.rates.length) state.rates = state.rates.filter((rate) => rate[0] < snapshot.rates[0][0]).concat(snapshot.rates);
  const known = state.firstTokens.length ? state.firstTokens.at(-1)[0] : 0;
  state.firstTokens.push(...snapshot.first_tokens.filter(([when]) => when > known));
  state.rates = state.rates.filter((rate) => rate[0] > snapshot.now - HISTORY_S - 2);
  state.firstTokens = state.firstTokens.filter(([when]) => when > snapshot.now - HISTORY_S);
  figures(snapshot);
}

// --- figures ---

// Shares of the last ten seconds, from the steps themselves.
function shares(stage, now) {
  const inside = ([from, to]) => Math.max(0, to - Math.max(from, now - WINDOW_S));
  let busy = 0, idle = 0;
  state.steps.forEach((step, index) => {
    busy += inside(step[3][stage]);
    if (index) for (const gap of bubbles(state.steps[index - 1], step, stage)) idle += inside(gap);
  });
  return [Math.min(1, busy / WINDOW_S), Math.min(1, idle / WINDOW_S)];
}

// The worst that is to be said of the server, and its colour.
function condition(snapshot) {
  if (snapshot.state === "recovering") return ["warn", "recovering: a stage is brought back, requests wait"];
  if (snapshot.state === "draining") return ["warn", "stopping: no new requests"];
  if (snapshot.state !== "ready") return ["bad", snapshot.state];
  if (snapshot.stalled_s > 10) return ["bad", `no step for ${seconds(snapshot.stalled_s)}`];
  return ["ok", `up ${seconds(snapshot.uptime_s)}`];
}

function figures(snapshot) {
  show(...condition(snapshot));
  $("running").textContent = count(snapshot.running);
  $("waiting").textContent = `${count(snapshot.waiting)} waiting`;
  $("flight").textContent = `${snapshot.in_flight} / ${snapshot.window}`;
  $("finished").textContent = `${count(snapshot.finished)} finished${snapshot.failed ? `, ${count(snapshot.failed)} failed` : ""}`;
  const used = snapshot.pages_used / snapshot.pages_total;
  $("kv").textContent = percent(used);
  $("kv-bar").style.width = percent(used);
  $("kv-note").textContent = `of ${count(snapshot.pages_total * snapshot.page_size)} tokens`;
  const recent = state.steps.filter((step) => step[3].at(-1)[1] > snapshot.now - WINDOW_S);
  $("prefill-rate").textContent = count(recent.reduce((sum, step) => sum + step[1], 0) / WINDOW_S);
  $("decode-rate").textContent = count(recent.reduce((sum, step) => sum + step[2], 0) / WINDOW_S);
  const last = state.firstTokens.slice(-10).map(([, value]) => value).sort((a, b) => a - b);
  $("ttft").textContent = last.length ? seconds(last[Math.floor(last.length / 2)]) : "–";
  state.about.stages.forEach((_, stage) => {
    const card = $("stages").children[stage], [busy, bubble] = shares(stage, snapshot.now);
    card.querySelector(".busy").style.width = percent(busy);
    card.querySelector(".share").textContent = percent(busy);
    card.querySelector(".bubble").style.width = percent(Math.min(1 - busy, bubble));
    card.querySelector(".idle").textContent = percent(bubble);
    card.querySelector(".queue").textContent = count(snapshot.stages[stage].queue);
    card.querySelector(".restarts").textContent = snapshot.stages[stage].restarts;
    card.classList.toggle("restarted", snapshot.stages[stage].restarts > 0);
  });
  prefills(snapshot);
}

function prefills(snapshot) {
  const box = $("prefills");
  $("more").textContent = snapshot.more_prefills ? `and ${snapshot.more_prefills} more` : "";
  if (!snapshot.prefills.length) {
    box.innerHTML = '<p class="empty">No prompt is being computed.</p>';
    return;
  }
  box.replaceChildren(...snapshot.prefills.map((prefill) => {
    const row = document.createElement("div");
    row.className = "prefill-row";
    row.innerHTML = '<span></span><span class="note"></span><div class="bar" role="progressbar" aria-valuemin="0"><span></span></div>';
    row.children[0].textContent = `request ${prefill.id}: ${count(prefill.computed)} of ${count(prefill.total)} tokens`;
    row.children[1].textContent = prefill.remaining_s == null ? "starting" : `about ${seconds(prefill.remaining_s)} left`;
    const bar = row.children[2];
    bar.setAttribute("aria-label", row.children[0].textContent);
    bar.setAttribute("aria-valuemax", prefill.total);
    bar.setAttribute("aria-valuenow", prefill.computed);
    bar.firstChild.style.width = percent(prefill.computed / prefill.total);
    return row;
  }));
}

function draw(at) {
  requestAnimationFrame(draw);
  if (!state.newest || document.hidden || (still.matches && at - state.drawnAt < 1000)) return;
  state.drawnAt = at;
  drawGantt($("gantt"), state.steps, state.about.stages.length, clock() - .3); // a little behind: steps arrive in lots
  if (at - state.chartsAt < 500) return;
  state.chartsAt = at;
  drawRates($("rates"), state.rates, clock());
  drawTtfts($("ttfts"), state.firstTokens, clock());
}

// --- the prompt ---

let sending = null;

async function send(event) {
  event.preventDefault();
  if (sending) return;
  const text = $("prompt").value, answer = $("answer"), chat = $("chat").checked;
  sending = new AbortController();
  answer.textContent = "";
  answer.className = "";
  $("send").disabled = true;
  $("stop").hidden = false;
  $("figures").textContent = "waiting for the first token";
  const began = performance.now();
  let first = null, tokens = 0;
  try {
    const response = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
      method: "POST",
      signal: sending.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        ...(chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
        max_tokens: Number($("tokens").value), temperature: 0, stream: true, stream_options: { continuous_usage_stats: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (first === null) {
        first = performance.now();
        $("figures").textContent = `TTFT ${seconds((first - began) / 1000)}`;
      }
      tokens = chunk.usage.completion_tokens;
      answer.textContent += (chat ? chunk.choices[0].delta.content : chunk.choices[0].text) ?? "";
    }
    const rate = tokens > 1 ? ` · ${((tokens - 1) / ((performance.now() - first) / 1000)).toFixed(1)} tokens/s` : "";
    $("figures").textContent = `TTFT ${seconds((first - began) / 1000)} · ${count(tokens)} tokens${rate}`;
  } catch (error) {
    $("figures").textContent = error.name === "AbortError" ? "stopped" : "";
    if (error.name !== "AbortError") {
      answer.className = "error";
      answer.textContent += `${answer.textContent && "\n"}${error.message}`;
    }
  } finally {
    sending = null;
    $("send").disabled = false;
    $("stop").hidden = true;
  }
}

$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => sending?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
requestAnimationFrame(draw);
follow();
