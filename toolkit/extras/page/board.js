"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const words = JSON.parse(at("words").textContent);
  const make = (tag, properties, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);  // texts stay texts
    return made;
  };
  const said = (text, isError = false) => {
    at("said").textContent = text;
    at("said").className = isError ? "bad" : "";
  };
  const post = async (name, given = {}) => {
    const answer = await fetch(`do/${name}`, { method: "POST", body: JSON.stringify(given) }).catch(() => {
      throw new Error(words.gone);
    });
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw new Error(error ?? `${answer.status} ${answer.statusText}`);
  };
  const ask = async (name, given) => (await post(name, given)).json();
  const stream = async (name, given, take) => {
    const reader = (await post(name, given)).body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) take(part.value);
  };
  const streamLines = async (name, given, take) => {
    let rest = "";
    await stream(name, given, (part) => {
      const lines = (rest + part).split("\n");
      rest = lines.pop();
      for (const line of lines.filter(Boolean)) take(JSON.parse(line));
    });
  };
  const tell = (error) => said(error.message, true);
  const busily = async (element, act) => {  // it shows that it works, and is not pressed twice
    if (element.ariaBusy === "true") return;
    element.ariaBusy = "true";
    await act().catch(tell);
    element.ariaBusy = "false";
  };
  const onClick = (id, act) => at(id).addEventListener("click", () => busily(at(id), async () => act()));
  const onSubmit = (id, act) => at(id).addEventListener("submit", (happened) => {
    happened.preventDefault();
    act();
  });

  // New
  let made = {};
  onSubmit("questions", () => busily(at("write"), async () => {
    said("");
    at("made").hidden = !(at("written").hidden = false);
    at("written").textContent = "";
    const given = Object.fromEntries(["model", "data", "gpus", "file"].map((name) => [name, at(`new-${name}`).value.trim()]));
    await streamLines("new", given, (line) => {
      if (line.text) at("written").append(line.text);
      else at("made").hidden = !(made = line);
    });
    at("edit").hidden = !made.base;
    at("written").dataset.done = "true";
  }));
  onClick("edit", async () => {
    if (![...at("base").options].some((one) => one.value === made.base)) at("base").append(make("option", { textContent: made.base }));
    at("base").value = made.base;
    location.hash = "recipe";
    await check();
  });
  onClick("train", async () => {
    said((await ask("start", { recipe: made.file, name: made.name, ranks: made.ranks })).said);
    location.hash = "runs";
  });

  // Runs
  const compared = new Set();
  let shown = [], seen = "", isBusy = false;
  const report = () => `report?${new URLSearchParams(shown.map((run) => ["run", run]))}`;
  const open = (runs) => {
    shown = runs;
    at("shown").hidden = at("report").hidden = !(at("log").hidden = true);
    at("shown-name").textContent = at("report").title = runs.join(" · ");
    at("shown").scrollIntoView();
    reload();
  };
  const reload = () => {
    at("shown").ariaBusy = "true";
    at("report").src = report();
  };
  at("report").addEventListener("load", () => { at("shown").ariaBusy = "false"; });
  const openLog = async (run) => {
    shown = [];
    const { text } = await ask("log", { run });
    at("shown").hidden = at("log").hidden = !(at("report").hidden = true);
    at("shown-name").textContent = run;
    at("log").textContent = text;
  };
  const button = (text, name, act) => {
    const made = make("button", { textContent: text, ariaLabel: `${text}: ${name}` });
    made.addEventListener("click", () => busily(made, act));
    return made;
  };
  const curve = (losses = []) => {
    if (losses.length < 2) return "";
    const [least, most] = [Math.min(...losses), Math.max(...losses)];
    const points = losses.map((loss, place) => [place / (losses.length - 1) * 100, 28 - (loss - least) / (most - least || 1) * 26]);
    const drawn = at("curve").content.firstElementChild.cloneNode(true);
    drawn.firstElementChild.setAttribute("d", "M" + points.map((point) => point.map((one) => one.toFixed(1)).join(" ")).join("L"));
    drawn.ariaLabel = `${words.curve}: ${losses[0].toPrecision(3)} → ${losses.at(-1).toPrecision(3)}`;
    return drawn;
  };
  const row = (one) => {
    const name = one.run || one.name;
    const link = one.run ? make("button", { className: "link", textContent: name, onclick: () => open([name]) }) : name;
    const verdict = one.verdict ? [make("span", { className: "note", textContent: one.verdict.replace("->", "→") })] : [];
    const box = make("input", { type: "checkbox", checked: compared.has(name), disabled: !one.run, ariaLabel: `${words.choose}: ${name}` });
    box.addEventListener("change", () => {
      compared[box.checked ? "add" : "delete"](name);
      at("compare").disabled = compared.size < 2;
    });
    const state = make("span", { className: `state ${one.state}`, textContent: one.cells[1] });
    const stop = one.is_alive ? [button(words.stop, name, async () => said((await ask("stop", { run: name })).said))] : [];
    const log = one.has_log ? [button(words.log, name, () => openLog(name))] : [];
    const cells = [[box], [link, ...verdict], [state], [curve(one.curve)], ...one.cells.slice(2).map((cell) => [cell]), [...stop, ...log]];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, ...cell)));
  };
  const list = async () => {
    if (isBusy || document.hidden) return;
    isBusy = true;
    try {
      const { heads, rows, note } = await ask("runs");
      at("list").ariaBusy = "false";
      at("listing").textContent = note;
      const now = JSON.stringify(rows);
      if (now === seen) return;
      const before = seen ? JSON.parse(seen) : [];
      seen = now;
      at("heads").replaceChildren(make("tr", {}, ...[words.choose, ...heads.slice(0, 2), words.curve, ...heads.slice(2), words.actions].map((head) => make("th", { scope: "col", textContent: head }))));
      at("rows").replaceChildren(...rows.map(row));
      at("no-runs").hidden = rows.length > 0;
      const chosen = at("model").value;
      at("model").replaceChildren(...rows.filter((one) => one.has_model).map((one) => make("option", { value: one.path, textContent: one.run })));
      if (chosen) at("model").value = chosen;
      const old = new Map(before.map((one) => [one.run, JSON.stringify(one)]));
      const isNew = rows.some((one) => shown.includes(one.run) && old.has(one.run) && old.get(one.run) !== JSON.stringify(one));
      if (isNew && at("live").checked) reload();
    } finally {
      isBusy = false;
    }
  };
  onClick("compare", () => open([...compared]));

  // Recipe
  const choices = (names, first) => [make("option", { value: "", textContent: first }), ...names.map((name) => make("option", { value: name, textContent: name }))];
  const fields = new Map();
  const field = (key, choicesOf, text) => {
    const input = choicesOf.length ? make("select", {}, ...choices(choicesOf, "")) : make("input", { spellcheck: false });
    input.name = key;
    const label = make("label", { className: "key" }, make("code", { textContent: key }), input, make("small", { textContent: text }));
    fields.set(key, { input, label });
    return label;
  };
  const typed = () => {
    const chosen = (isGroup) => Object.fromEntries([...fields].filter(([key, { input }]) => key.startsWith("/") === isGroup && input.value.trim()).map(([key, { input }]) => [key.replace("/", ""), input.value.trim()]));
    return { base: at("base").value, gpus: at("gpus").value.trim(), groups: chosen(true), values: chosen(false) };
  };
  const tableOf = (columns) => {  // letters of some languages are wider than one column of a terminal
    const last = at("plan").lastElementChild;
    if (last?.rows?.[0].cells.length === columns) return last;
    return at("plan").appendChild(make("table", {}));
  };
  const show = ({ errors, more, notes, plan, text, values }) => {
    for (const [key, { input, label }] of fields) {
      const wrong = errors.find((error) => error.keys.includes(key) || error.text.includes(`${key} = `));
      input.title = wrong?.text ?? "";
      input.ariaInvalid = String(Boolean(wrong));
      label.classList.toggle("bad", Boolean(wrong));
      const value = values[key] ?? "";
      if (input.tagName === "INPUT") input.placeholder = value;
      else if (!key.startsWith("/")) input.options[0].textContent = value;
    }
    at("errors").replaceChildren(...errors.map((error) => make("li", { className: "bad", textContent: error.text })));
    if (more) at("errors").append(make("li", { textContent: `… ${more}` }));
    if (!errors.length) at("errors").append(make("li", { className: "good", textContent: words.in_order }));
    at("notes").replaceChildren(...notes.map((note) => make("p", { className: "note", textContent: note })));
    // Tables keep their columns; sentences may be longer than the page is wide.
    at("plan").replaceChildren();
    for (const line of plan.join("\n").split("\n").map((one) => one.trim()).filter(Boolean)) {
      const cells = line.split(/ {2,}/);
      if (cells.length < 3) at("plan").append(make("p", { textContent: line }));
      else tableOf(cells.length).append(make("tr", {}, ...cells.map((cell) => make("td", { textContent: cell }))));
    }
    at("text").textContent = text;
  };
  let timer = 0, latest = 0;
  const check = async () => {
    const mine = ++latest;
    at("form").ariaBusy = "true";
    const found = await ask("check", typed()).finally(() => { at("form").ariaBusy = String(mine !== latest); });
    if (mine === latest) show(found);  // what was typed meanwhile is checked by a later one
    document.documentElement.dataset.checked = mine;
  };
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => check().catch(tell), 300);
  };
  const build = async () => {
    const { recipes, groups, keys, gpus } = await ask("form");
    at("new-gpus").value ||= gpus;
    at("models").append(...groups.model.map((value) => make("option", { value })));
    at("base").append(...recipes.map((name) => make("option", { textContent: name })));
    at("groups").append(...Object.entries(groups).map(([group, names]) => {
      const label = field(`/${group}`, names, "");
      fields.get(`/${group}`).input.options[0].textContent = words.of_recipe;
      return label;
    }));
    const sections = Object.groupBy(keys, ({ key }) => key.includes(".") ? key.split(".")[0] : "");
    for (const [name, inner] of Object.entries(sections)) {
      const parts = inner.map(({ key, choices: names, text }) => field(key, names, text));
      at("keys").append(make("details", {}, make("summary", { textContent: name || "…" }), ...parts));
    }
    await check();
  };
  at("form").addEventListener("input", ({ target }) => {
    if (target.id !== "search") return later();
    const wanted = target.value.trim().toLowerCase();
    for (const part of at("keys").children) {
      const labels = [...part.querySelectorAll("label")];
      for (const label of labels) label.hidden = !label.textContent.toLowerCase().includes(wanted);
      part.hidden = labels.every((label) => label.hidden);
      part.open = Boolean(wanted) && !part.hidden;
    }
  });
  onSubmit("form", () => check().catch(tell));
  onClick("save", async () => {
    const given = { ...typed(), file: at("file").value.trim() };
    const answer = await ask("save", given);
    said((answer.exists && confirm(`${answer.said}\n${words.overwrite}`) ? await ask("save", { ...given, overwrite: true }) : answer).said);
  });
  onClick("start", async () => {
    said((await ask("start", { recipe: at("file").value.trim(), name: at("name").value, ranks: at("ranks").value })).said);
    location.hash = "runs";
  });

  // Samples, coloured as on a terminal
  const KINDS = { "1;32": "trained", 36: "special", 90: "padding" };
  const marked = (text) => text.split("\x1b[").map((part, place) => {
    if (!place) return part;
    const end = part.indexOf("m");
    const kind = KINDS[part.slice(0, end)];
    return kind ? make("span", { className: kind, textContent: part.slice(end + 1) }) : part.slice(end + 1);
  });
  onClick("show", async () => {
    let text = "";
    at("marked").textContent = words.working;
    await stream("samples", { ...typed(), n: at("count").value, split: at("split").value }, (part) => {
      text += part;
      at("marked").replaceChildren(...marked(text));
    });
    at("marked").dataset.done = "true";
  });

  // Chat
  const talk = async (name, given) => {
    const answer = make("p", { className: "answer" });
    at("talk").append(answer);
    at("ask").disabled = true;
    await streamLines(name, given, (line) => {
      if (line.text) answer.textContent += line.text;
      if (line.note?.trim()) answer.before(make("p", { className: "note", textContent: line.note }));
      if (line.closed) answer.before(make("p", { className: "note bad", textContent: line.closed }));
      if ("end" in line) at("ask").disabled = false;
    });
    return answer;
  };
  onClick("load", async () => {
    said(words.working);
    await talk("open", { path: at("path").value.trim() || at("model").value });
    said(at("ask").disabled ? "" : words.loaded);
  });
  onClick("unload", async () => {
    await ask("close");
    at("ask").disabled = true;
    at("talk").replaceChildren();
    said("");
  });
  onClick("ask", () => {
    const text = at("question").value.trim().replaceAll("\n", " ");
    if (!text) return undefined;
    at("talk").append(make("p", { className: "asked", textContent: text }));
    at("question").value = "";
    return talk("ask", { text });
  });
  at("question").addEventListener("keydown", (happened) => {
    if (happened.key !== "Enter" || happened.shiftKey || happened.isComposing) return;
    happened.preventDefault();
    at("ask").click();
  });
  onClick("interrupt", () => ask("interrupt"));

  // Which part is shown
  const turn = () => {
    const name = ["new", "runs", "recipe", "samples", "chat"].find((one) => `#${one}` === location.hash) ?? "new";
    for (const part of document.querySelectorAll("main")) part.hidden = part.id !== name;
    for (const link of document.querySelectorAll("nav a")) link.ariaCurrent = String(link.hash === `#${name}`);
    scrollTo(0, 0);  // not where the part of this name begins
    if (name === "runs" || name === "chat") list().catch(tell);
  };
  addEventListener("hashchange", turn);
  history.replaceState(null, "", location.pathname + location.hash);  // the token is in the cookie now
  turn();
  build().catch(tell);
  setInterval(() => (at("runs").hidden && at("chat").hidden) || list().catch(tell), 3000);
})();
