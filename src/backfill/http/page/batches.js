// Batches: upload, progress, results.

import { getJson, key, postJson, request, wordsOf } from "./api.js";
import { html } from "./chart.js";

const INTERVAL_MS = 2000;
const RATE_S = 60; // progress of so long tells the expected end
const LIMIT = 20; // rows
const SCANNED = 100; // batches of an answer, while some are looked for
const MAX_SHARE = 0.1; // of the time that reading the list may take
const FAULTS = 3; // shown of a batch
const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);
const element = (id) => document.getElementById(id);

export class Batches {
  constructor() {
    this.cursors = [null]; // of the pages up to the one that is shown
    this.progress = new Map();
    this.names = new Map(); // by file; empty for one that is deleted
    this.words = ""; // what is looked for
    this.shown = ""; // the answer that the table shows
    element("batch-find").addEventListener("input", () => {
      this.words = element("batch-find").value.trim().toLowerCase();
      this.turn(() => (this.cursors = [null]));
    });
    element("batch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.upload();
    });
    element("batch-older").addEventListener("click", () => this.turn(() => this.cursors.push(this.lastId)));
    element("batch-newer").addEventListener("click", () => this.turn(() => this.cursors.pop()));
  }

  async run() {
    for (;;) {
      const startedAt = performance.now();
      if (!document.hidden) await this.read();
      const took = performance.now() - startedAt;
      await new Promise((resolve) => setTimeout(resolve, Math.max(INTERVAL_MS, took / MAX_SHARE)));
    }
  }

  async turn(change) {
    change();
    await this.read();
  }

  async read() {
    const [cursor, words] = [this.cursors.at(-1), this.words];
    try {
      const page = await this.find(words, cursor);
      if (cursor === this.cursors.at(-1) && words === this.words) this.show(page);
      if (this.isFaulty) this.say("");
    } catch (error) {
      if (error.status === 404 && cursor) this.cursors = [null]; // another key's, or deleted since
      else if (error.status === 404) element("batches").hidden = true; // a server without batches
      else if (error.status === 401) this.show({ data: [], has_more: false });
      else if (error.status) {
        this.say(error.message, true);
        this.isFaulty = true;
      }
      // Without a connection the head of the page says so.
    }
  }

  /** The newest batches after one that have all of the words in their file's name, id or status. */
  async find(words, after) {
    const wanted = words.split(/\s+/);
    const found = [];
    let page;
    do {
      page = await getJson(`v1/batches?limit=${words ? SCANNED : LIMIT}${after ? `&after=${after}` : ""}`);
      await this.learnNames(page.data.map((batch) => batch.input_file_id));
      found.push(...page.data.filter((batch) => {
        const text = `${this.names.get(batch.input_file_id)} ${batch.id} ${batch.status}`.toLowerCase();
        return wanted.every((each) => text.includes(each));
      }));
      after = page.data.at(-1)?.id;
    } while (words && words === this.words && page.has_more && found.length <= LIMIT);
    return { data: found.slice(0, LIMIT), has_more: words ? found.length > LIMIT : page.has_more };
  }

  async learnNames(ids) {
    const unknown = ids.filter((id) => !this.names.has(id));
    if (unknown.length > LIMIT) {
      for (const file of (await getJson("v1/files?purpose=batch")).data) this.names.set(file.id, file.filename);
      for (const id of unknown) if (!this.names.has(id)) this.names.set(id, "");
    } else await Promise.all(unknown.map((id) => this.learnName(id)));
  }

  async learnName(id) {
    try {
      this.names.set(id, (await getJson(`v1/files/${id}`)).filename);
    } catch (error) {
      if (error.status !== 404) throw error;
      this.names.set(id, "");
    }
  }

  show(page) {
    element("batches").hidden = false;
    const text = JSON.stringify(page);
    if (text === this.shown && !page.data.some((batch) => OPEN.has(batch.status))) return;
    this.shown = text;
    this.lastId = page.data.at(-1)?.id;
    element("batch-newer").disabled = this.cursors.length === 1;
    element("batch-older").disabled = !page.has_more;
    const focused = document.activeElement?.dataset?.action;
    element("batch-list").tBodies[0].replaceChildren(...page.data.map((batch) => this.row(batch)));
    if (this.words && !page.data.length) {
      const none = html("td", { colSpan: 6, textContent: "No batch has these words in its file's name, id or status." });
      element("batch-list").tBodies[0].append(html("tr", {}, none));
    }
    if (focused) document.querySelector(`[data-action="${focused}"]`)?.focus();
    const shown = new Set(page.data.map((batch) => batch.id));
    for (const id of this.progress.keys()) if (!shown.has(id)) this.progress.delete(id);
  }

  row(batch) {
    const { total, completed, failed } = batch.request_counts;
    const done = completed + failed;
    const words = total ? `${done.toLocaleString("en")} of ${total.toLocaleString("en")}` : OPEN.has(batch.status) ? "not counted yet" : "none";
    const bar = html("progress", { max: total || 1, value: done, ariaLabel: `Lines done: ${words}` });
    const lines = html("td", {}, bar, ` ${words}`);
    if (failed) lines.append(html("span", { className: "error", textContent: `, ${failed} failed` }));
    const status = html("td", { textContent: batch.status.replace("_", " ") });
    const faults = batch.errors?.data ?? [];
    for (const each of faults.slice(0, FAULTS)) {
      const line = each.line == null ? "" : `Line ${each.line}: `;
      status.append(html("div", { className: "error", textContent: line + each.message }));
    }
    const more = faults.length - FAULTS;
    if (more > 0) status.append(html("div", { className: "error", textContent: `and ${more} more` }));
    if (batch.warning) status.append(html("div", { className: "warning", textContent: batch.warning }));
    const name = html("th", { scope: "row", textContent: this.names.get(batch.input_file_id) });
    name.append(html("div", { className: "note", textContent: batch.id }));
    return html("tr", {}, name, status, lines,
      html("td", { textContent: this.expectedEnd(batch, done, total) }),
      html("td", { textContent: batch.usage.output_tokens.toLocaleString("en") }), this.actions(batch));
  }

  expectedEnd(batch, done, total) {
    if (!OPEN.has(batch.status)) {
      const endedAt = batch.completed_at ?? batch.failed_at ?? batch.expired_at ?? batch.cancelled_at;
      return endedAt ? `ended ${new Date(1000 * endedAt).toLocaleString()}` : "";
    }
    const now = performance.now() / 1000;
    const points = (this.progress.get(batch.id) ?? []).filter((each) => each.at > now - RATE_S);
    points.push({ at: now, done });
    this.progress.set(batch.id, points);
    const grown = done - points[0].done;
    if (!(grown > 0) || batch.status !== "in_progress") return "not known yet";
    const left_s = ((total - done) * (now - points[0].at)) / grown;
    return `in about ${left_s < 90 ? `${Math.ceil(left_s)} s` : left_s < 5400 ? `${Math.ceil(left_s / 60)} min` : `${(left_s / 3600).toFixed(1)} h`}`;
  }

  actions(batch) {
    const cell = html("td");
    const add = (words, name, act) => {
      const button = html("button", { type: "button", textContent: words, ariaLabel: `${words}: ${batch.id}` });
      button.dataset.action = `${name}-${batch.id}`;
      button.addEventListener("click", () => act().catch((error) => this.say(wordsOf(error), true)));
      cell.append(button);
    };
    if (batch.output_file_id) add("Results", "results", () => download(batch.output_file_id, `${batch.id}-output.jsonl`));
    if (batch.error_file_id) add("Errors", "errors", () => download(batch.error_file_id, `${batch.id}-errors.jsonl`));
    if (batch.status === "validating" || batch.status === "in_progress") {
      add("Cancel", "cancel", async () => {
        await request(`v1/batches/${batch.id}/cancel`, { method: "POST" });
        await this.read();
      });
    }
    return cell;
  }

  async upload() {
    const [file] = element("batch-file").files;
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    element("batch-send").disabled = true;
    this.say(`Uploading ${file.name}`);
    try {
      const endpoint = await endpointOf(file);
      const uploaded = await (await request("v1/files", { method: "POST", body: form })).json();
      const body = { input_file_id: uploaded.id, endpoint, completion_window: element("batch-window").value };
      const batch = await (await postJson("v1/batches", body)).json();
      this.say(`${file.name} is batch ${batch.id}`);
      this.cursors = [null];
      await this.read();
    } catch (error) {
      this.say(wordsOf(error), true);
    }
    element("batch-send").disabled = false;
  }

  say(text, isError = false) {
    this.isFaulty = false; // not of the list's reading
    element("batch-message").textContent = text;
    element("batch-message").className = isError ? "error" : "";
  }
}

/** The `url` of a file's first line, which all of its lines have. */
async function endpointOf(file) {
  const start = await file.slice(0, 1 << 20).text();
  return /"url"\s*:\s*"(\/v1\/[\w/]+)"/.exec(start)?.[1] ?? "/v1/chat/completions";
}

async function download(id, name) {
  const path = `v1/files/${id}/content`;
  const link = html("a", { download: name, href: path });
  if (key.get()) link.href = URL.createObjectURL(await (await request(path)).blob()); // a link sends no key
  link.click();
  if (key.get()) setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
