// The episode browser: pick a step and a group, see each attempt token by token.
// Token text is set as text, never as markup: a model may write anything.
"use strict";
const records = JSON.parse(document.getElementById("episodes").textContent);
const steps = [...new Set(records.map((r) => r.step))];
const stepPick = document.getElementById("step"), groupPick = document.getElementById("group");
const list = document.getElementById("list"), tip = document.getElementById("tip");

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function fill(select, values, label) {
  select.replaceChildren(...values.map((value) => {
    const option = element("option", "", label(value));
    option.value = value;
    return option;
  }));
}

function visible(piece) {
  return piece.replaceAll("\n", "\u21b5").replaceAll(" ", "\u00b7");
}

function tokenSpan(episode, index, scale) {
  const role = episode.roles[index];
  const span = element("span", role, visible(episode.pieces[index]));
  if (role !== "model") return span;
  const advantage = episode.advantages[index], logprob = episode.logprobs[index];
  const colour = advantage >= 0 ? "--good" : "--bad";
  span.style.background = `rgb(var(${colour}) / ${0.65 * Math.min(1, Math.abs(advantage) / scale)})`;
  span.dataset.tip = `logprob ${logprob.toFixed(4)}  (p ${Math.exp(logprob).toFixed(3)})\n` +
    `advantage ${advantage.toFixed(3)}\nversion ${episode.versions[index]}`;
  return span;
}

function episodeRow(episode, scale) {
  const row = element("div", "episode"), meta = element("div", "meta"), tokens = element("div", "tokens");
  meta.append(element("b", "", `reward ${episode.reward.toFixed(2)}`), ` · ${episode.stop}`, element("br"));
  meta.append(Object.entries(episode.parts).map(([name, value]) => `${name} ${value.toFixed(2)}`).join(", "));
  tokens.append(...episode.pieces.map((_, index) => tokenSpan(episode, index, scale)));
  row.append(meta, tokens);
  return row;
}

function showGroup() {
  const record = records[Number(groupPick.value)];
  if (!record) return;
  const advantages = record.episodes.flatMap((e) => e.advantages.map(Math.abs));
  const scale = Math.max(1e-6, ...advantages);
  const head = element("p", "", `reference answer: ${record.reference}`);
  list.replaceChildren(head, ...record.episodes.map((episode) => episodeRow(episode, scale)));
}

// How far apart the attempts of a group were: the most telling group of a step comes first.
function spread(record) {
  const rewards = record.episodes.map((e) => e.reward);
  return Math.max(...rewards) - Math.min(...rewards);
}

function showStep() {
  const step = Number(stepPick.value);
  const indices = records.map((r, index) => [r, index]).filter(([r]) => r.step === step).map(([, index]) => index);
  indices.sort((a, b) => spread(records[b]) - spread(records[a]));
  fill(groupPick, indices, (index) => `group ${records[index].group}: ${records[index].prompt}`);
  showGroup();
}

if (records.length) {
  fill(stepPick, steps, (step) => `step ${step}`);
  stepPick.value = steps[steps.length - 1];
  stepPick.addEventListener("change", showStep);
  groupPick.addEventListener("change", showGroup);
  showStep();
} else {
  list.textContent = "no episodes were kept (run.keep_episodes)";
}

document.addEventListener("mousemove", (event) => {
  const text = event.target.dataset ? event.target.dataset.tip : undefined;
  tip.style.display = text ? "block" : "none";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 180)}px`;
  tip.style.top = `${event.clientY + 16}px`;
});
