// The chat box.

import { Refused, postJson, wordsOf } from "./api.js";
import { html, plural } from "./chart.js";

const PAINT_MS = 100; // the browser draws on the processors that the server computes with

const element = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.log = element("chat-log");
    this.messages = [];
    this.abort = null;
    element("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    element("chat-input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    element("chat-stop").addEventListener("click", () => this.abort?.abort());
    element("chat-clear").addEventListener("click", () => {
      this.abort?.abort();
      this.messages = [];
      this.log.replaceChildren();
      element("chat-input").focus();
    });
  }

  async send() {
    const text = element("chat-input").value.trim();
    if (!text || this.abort) return;
    element("chat-input").value = "";
    const messages = this.messages;
    messages.push({ role: "user", content: text });
    this.show("you", text);
    this.abort = new AbortController();
    this.setBusy(true);
    const answer = new Answer((role, className) => this.show(role, "", className), this.log);
    try {
      const options = { signal: this.abort.signal };
      await answer.read(await postJson("v1/chat/completions", this.body(), options));
    } catch (error) {
      if (error.name === "AbortError") {
        if (this.messages === messages) answer.note("stopped"); // else it was cleared
      } else this.show("error", wordsOf(error), "error");
    }
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else {
      messages.pop(); // a question without an answer is not asked again with the next one
      if (this.messages === messages) element("chat-input").value ||= text;
    }
    this.abort = null;
    this.setBusy(false);
  }

  body() {
    const system = element("chat-system").value.trim();
    const body = {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
      service_tier: element("chat-class").value,
    };
    const fields = { temperature: "chat-temperature", top_p: "chat-top-p", max_tokens: "chat-max-tokens" };
    for (const [name, id] of Object.entries(fields)) if (element(id).value) body[name] = Number(element(id).value);
    return body;
  }

  setBusy(isBusy) {
    element("chat-send").disabled = isBusy;
    element("chat-stop").disabled = !isBusy;
  }

  show(role, text, className = "") {
    const message = html("p", { className: `message ${className}`, textContent: text });
    message.dataset.role = role;
    this.log.append(message);
    this.log.scrollTop = this.log.scrollHeight;
    return message;
  }
}

class Answer {
  /** @param open makes an element for the answer or its reasoning. */
  constructor(open, log) {
    Object.assign(this, { open, log, text: "", firstAt: null, sentAt: performance.now() });
    this.unshown = new Map(); // by text node, what is to be added to it
    this.timer = null;
  }

  /** Show a response of server-sent events as they come. */
  async read(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) if (event.startsWith("data: {")) this.onChunk(JSON.parse(event.slice(6)));
      }
    } finally {
      this.paint();
    }
  }

  onChunk(chunk) {
    if (chunk.error) throw new Refused(500, chunk.error.message);
    const delta = chunk.choices?.[0]?.delta ?? {};
    this.append("reasoning", delta.reasoning_content ?? delta.reasoning);
    this.append("answer", delta.content);
    if (chunk.usage) this.onUsage(chunk.usage);
  }

  append(part, text) {
    if (!text) return;
    const isFirst = this.firstAt === null;
    this.firstAt ??= performance.now();
    this[part] ??= this.open(part === "answer" ? "model" : "reasoning", part).appendChild(new Text());
    if (part === "answer") this.text += text;
    this.unshown.set(this[part], (this.unshown.get(this[part]) ?? "") + text);
    if (isFirst) this.paint();
    else this.timer ??= setTimeout(() => this.paint(), PAINT_MS);
  }

  paint() {
    clearTimeout(this.timer);
    this.timer = null;
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    for (const [node, text] of this.unshown) node.appendData(text);
    this.unshown.clear();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  onUsage(usage) {
    const [first, last] = [(this.firstAt ?? performance.now()) - this.sentAt, performance.now() - this.sentAt];
    const speed = usage.completion_tokens > 1 ? `, ${((usage.completion_tokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s` : "";
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.note(`first token ${Math.round(first)} ms, ${plural(usage.completion_tokens, "token")}${speed}; prompt ${usage.prompt_tokens}, ${cached} cached`);
  }

  note(text) {
    this.log.append(html("p", { className: "note", textContent: text }));
    this.log.scrollTop = this.log.scrollHeight;
  }
}
