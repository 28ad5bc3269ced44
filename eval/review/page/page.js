"use strict";
// The rating page. Texts of requests and answers only ever become text nodes.

const LONG_CHARACTERS = 1500;
const LONG_LINES = 18;
const FEW_CHARACTERS = 700;
const FEW_CHARACTERS_NARROW = 250;
const NARROW = window.matchMedia("(max-width: 46rem)");
const $ = (id) => document.getElementById(id);

const state = {
  rater: "", order: [], ratings: {}, canUndo: false,
  position: 0, faults: new Set(), wantsEarlier: null, shownAt: 0, isBusy: false, items: new Map(), drafts: new Map(),
};

async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let reply;
  try {
    reply = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Start `evaluate review serve` again; what was saved is safe.");
  }
  const data = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(data.error || `The server refused this (${reply.status}).`);
  return data;
}

function complain(error) {
  $("notice").textContent = error.message;
  $("notice").hidden = false;
}

function setBusy(isBusy) {
  state.isBusy = isBusy;
  $("review").setAttribute("aria-busy", String(isBusy));
}

// One request at a time: a second key press while one is under way is ignored.
async function busy(work) {
  if (state.isBusy) return;
  setBusy(true);
  try {
    await work();
    $("notice").hidden = true;
  } catch (error) {
    complain(error);
  } finally {
    setBusy(false);
  }
}

function take(data) {
  state.ratings = data.ratings;
  state.canUndo = data.can_undo;
}

const currentItem = () => state.order[state.position];
const currentRating = () => state.ratings[currentItem()];

async function fetchItem(id) {
  if (!state.items.has(id)) state.items.set(id, await ask(`/api/items/${encodeURIComponent(id)}`));
  return state.items.get(id);
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function isLong(text) {
  return text.length > LONG_CHARACTERS || text.split("\n").length > LONG_LINES;
}

// Fills a text and, where it is long, puts a button below that shows it whole.
function fill(target, text) {
  target.textContent = text;
  target.className = isLong(text) ? "text long" : "text";
  if (target.nextElementSibling?.classList.contains("more")) target.nextElementSibling.remove();
  if (!isLong(text)) return;
  const more = element("button", "more", "");
  more.type = "button";
  more.addEventListener("click", () => unfold(target, more, !target.classList.contains("whole")));
  target.after(more);
  unfold(target, more, false);
}

function unfold(target, more, isWhole) {
  target.classList.toggle("whole", isWhole);
  more.setAttribute("aria-expanded", String(isWhole));
  more.textContent = isWhole ? "Show less" : `Show all ${target.textContent.length.toLocaleString("en")} characters`;
}

function unfoldAll() {
  const folded = [...document.querySelectorAll(".more")];
  const isWhole = folded.some((more) => more.getAttribute("aria-expanded") === "false");
  for (const more of folded) unfold(more.previousElementSibling, more, isWhole);
}

function messageBox(message) {
  const box = element("div", `message ${message.role === "user" ? "user" : ""}`, "");
  const text = element("div", "text", "");
  text.dir = "auto";
  box.append(element("div", "role", message.role), text);
  fill(text, message.text);
  return box;
}

// The last message is always there; what comes before it is folded where it would push the answers
// off the screen, unless the rater said otherwise.
function showMessages(messages) {
  const earlier = messages.slice(0, -1);
  const size = messages.reduce((sum, message) => sum + message.text.length, 0);
  $("about").textContent = `${size.toLocaleString("en")} characters`;
  $("earlier").hidden = earlier.length === 0;
  $("earlier").open = state.wantsEarlier
    ?? size <= (NARROW.matches ? FEW_CHARACTERS_NARROW : FEW_CHARACTERS);
  $("earlier-count").textContent = earlier.length === 1 ? "1 earlier message" : `${earlier.length} earlier messages`;
  $("earlier-messages").replaceChildren(...earlier.map(messageBox));
  $("last-message").replaceChildren(messageBox(messages.at(-1)));
}

function toggleEarlier() {
  state.wantsEarlier = !$("earlier").open;
  $("earlier").open = state.wantsEarlier;
}

// Indentation is part of an answer that is code; both answers have the same letters, or they would
// tell the sides apart.
const looksLikeCode = (text) => /^\s*[{[]|```|\n {2,}\S/.test(text);

function showAnswers(item) {
  const isCode = looksLikeCode(item.a) || looksLikeCode(item.b);
  for (const side of ["a", "b"]) {
    fill($(`text-${side}`), item[side]);
    $(`text-${side}`).classList.toggle("code", isCode);
  }
}

function showChoice() {
  const rating = currentRating();
  for (const button of document.querySelectorAll("[data-choice]")) {
    button.setAttribute("aria-pressed", String(rating?.choice === button.dataset.choice));
  }
  for (const section of document.querySelectorAll("[data-side]")) {
    section.classList.toggle("chosen", rating?.choice === section.dataset.side);
  }
  for (const button of document.querySelectorAll("[data-fault]")) {
    button.setAttribute("aria-pressed", String(state.faults.has(button.dataset.fault)));
  }
}

function showProgress() {
  const done = Object.keys(state.ratings).length;
  $("place").textContent = `${state.position + 1} of ${state.order.length}`;
  $("bar").max = state.order.length;
  $("bar").value = done;
  $("count").textContent = done === state.order.length ? "All rated. Thank you!" : `${done} of ${state.order.length} rated`;
  $("previous").disabled = state.position === 0;
  $("next").disabled = state.position === state.order.length - 1;
  $("unrated").disabled = done === state.order.length;
  $("undo").disabled = !state.canUndo;
}

// What was marked and written on an item that has no rating yet, for when the rater comes back.
function keepDraft() {
  if (!currentRating()) state.drafts.set(currentItem(), { critical: [...state.faults], note: $("note").value });
}

async function show(position) {
  const item = await fetchItem(state.order[position]);
  const hasMoved = position !== state.position || !$("text-a").dataset.item;
  state.position = position;
  const known = currentRating() ?? state.drafts.get(item.id);
  state.faults = new Set(known?.critical ?? []);
  state.shownAt = performance.now();
  showMessages(item.messages);
  showAnswers(item);
  $("text-a").dataset.item = item.id;
  $("note").value = known?.note ?? "";
  showChoice();
  showProgress();
  if (hasMoved) {
    window.scrollTo(0, 0);
    $("item").focus({ preventScroll: true });
  }
  const after = state.order[position + 1];
  if (after) fetchItem(after).catch(() => {});
}

// The nearest unrated position behind the current one, from the start again at the end.
function nextUnrated() {
  const count = state.order.length;
  for (let step = 1; step <= count; step += 1) {
    const position = (state.position + step) % count;
    if (!(state.order[position] in state.ratings)) return position;
  }
  return Math.min(state.position + 1, count - 1);
}

async function save(choice) {
  const rating = {
    choice, critical: [...state.faults].sort(), note: $("note").value.trim(),
    seconds: Math.round((performance.now() - state.shownAt) / 100) / 10,
  };
  take(await ask("/api/ratings", { rater: state.rater, item: currentItem(), rating }));
}

const choose = (choice) => busy(async () => {
  const wasRated = currentRating() !== undefined;
  await save(choice);
  await show(wasRated ? state.position : nextUnrated());
});

const toggleFault = (side) => busy(async () => {
  if (state.faults.has(side)) state.faults.delete(side);
  else state.faults.add(side);
  showChoice();
  if (currentRating()) {
    await save(currentRating().choice);
    showProgress();
  }
});

const keepNote = () => busy(async () => {
  const rating = currentRating();
  if (rating && rating.note !== $("note").value.trim()) {
    await save(rating.choice);
    showProgress();
  }
});

const undo = () => busy(async () => {
  const data = await ask("/api/undo", { rater: state.rater });
  keepDraft();
  take(data);
  state.drafts.delete(data.item);
  await show(data.item ? state.order.indexOf(data.item) : state.position);
});

const move = (position) => busy(async () => {
  if (position < 0 || position >= state.order.length) return;
  keepDraft();
  await show(position);
});

async function begin(name) {
  const data = await ask("/api/begin", { rater: name });
  state.rater = data.rater;
  $("who").textContent = data.rater;
  $("who").setAttribute("aria-label", `Rater ${data.rater}: change`);
  state.order = data.order;
  take(data);
  sessionStorage.setItem("rater", data.rater);
  document.title = `Blind review: ${data.rater}`;
  $("welcome").hidden = true;
  $("review").hidden = false;
  const first = state.order.findIndex((item) => !(item in state.ratings));
  await show(Math.max(first, 0));
}

const KEYS = {
  1: () => choose("a"), 2: () => choose("tie"), 3: () => choose("b"),
  A: () => toggleFault("a"), B: () => toggleFault("b"),
  ArrowLeft: () => move(state.position - 1), ArrowRight: () => move(state.position + 1),
  f: () => move(nextUnrated()), u: undo, n: () => $("note").focus(), e: unfoldAll,
  p: toggleEarlier, "?": () => $("keys").showModal(),
};

function onKey(event) {
  if ($("review").hidden || $("keys").open || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === $("note")) {
    if (event.key === "Escape") $("item").focus();
    return;
  }
  // With Caps Lock a letter without Shift arrives as a capital, and the other way round.
  const letter = event.key.length === 1 && /[a-z]/i.test(event.key);
  const key = letter ? (event.shiftKey ? event.key.toUpperCase() : event.key.toLowerCase()) : event.key;
  const action = Object.hasOwn(KEYS, key) ? KEYS[key] : undefined;
  if (!action || event.repeat || (!$("keys-on").checked && key !== "?")) return;
  event.preventDefault();
  action();
}

function connect() {
  document.addEventListener("keydown", onKey);
  $("previous").addEventListener("click", () => move(state.position - 1));
  $("next").addEventListener("click", () => move(state.position + 1));
  $("unrated").addEventListener("click", () => move(nextUnrated()));
  $("undo").addEventListener("click", undo);
  $("who").addEventListener("click", () => {
    sessionStorage.removeItem("rater");
    window.location.reload();
  });
  $("help").addEventListener("click", () => $("keys").showModal());
  $("note").addEventListener("change", keepNote);
  $("earlier-count").addEventListener("click", (event) => {
    event.preventDefault();
    toggleEarlier();
  });
  for (const button of document.querySelectorAll("[data-choice]")) {
    button.addEventListener("click", () => choose(button.dataset.choice));
  }
  for (const button of document.querySelectorAll("[data-fault]")) {
    button.addEventListener("click", () => toggleFault(button.dataset.fault));
  }
  $("begin").addEventListener("submit", (event) => {
    event.preventDefault();
    busy(() => begin($("rater").value)).then(() => {
      if ($("review").hidden) $("rater").setCustomValidity($("notice").textContent);
      $("rater").reportValidity();
    });
  });
  $("rater").addEventListener("input", () => $("rater").setCustomValidity(""));
}

async function start() {
  connect();
  const pack = await ask("/api/pack");
  $("who").disabled = pack.rater !== null;
  const known = pack.rater ?? sessionStorage.getItem("rater");
  if (known) return begin(known);
  $("welcome").hidden = false;
  $("rater").focus();
}

start().catch((error) => {
  $("review").hidden = false;
  complain(error);
});
