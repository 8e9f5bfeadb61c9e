// The live view: reads /metrics once a second and shows what changed.

import { Refused, getText } from "./api.js";
import { Chart, html, plural } from "./chart.js";
import { Reading, growth, hasRestarted, quantile, rate } from "./metrics.js";

const INTERVAL_MS = 1000;
const WINDOW_S = 30; // of quantiles: a second alone has too few requests
const ONLINE = { class: "online" };
const CLASSES = ["online", "offline"];
const KINDS = ["online", "mixed", "offline"];
const USES = [["online", "online"], ["offline", "offline"], ["cached", "third"], ["empty", "grey"]]; // of KV blocks
const TIERS = [["device", "KV blocks on the device"], ["host", "KV blocks in host memory"]];
const TOTALS = [["preemptions", "num_preemptions_total"], ["tokens computed again", "recomputed_tokens_total"],
  ["tokens of stopped steps discarded", "discarded_tokens_total"],
  ["tokens of KV copied to host memory", "checkpointed_tokens_total"],
  ["tokens of KV copied back", "restored_tokens_total"],
  ["prompt tokens found in the prefix cache", "prefix_cache_hits_total"]];

const SAMPLES = [...TOTALS.map(([, name]) => name), "generation_tokens_total", "step_seconds_sum", "step_seconds_count",
  "iteration_tokens_total_sum", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
  "slo_seconds", "slo_attained_total", "slo_missed_total", "kv_tier_blocks",
  "num_requests_running", "num_requests_waiting"];
const METRICS = `metrics?${new URLSearchParams(SAMPLES.map((name) => ["name[]", `backfill:${name}`]))}`;

const whole = (value) => (value === null ? "–" : Math.round(value).toLocaleString("en"));
const short = (value) => (value >= 10000 ? `${Math.round(value / 1000)}k` : `${Number(value.toPrecision(2))}`);
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const axisPercent = (share) => `${Math.round(100 * share)} %`;
const axisTime = (seconds) => (seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`);
const time = (seconds) => (seconds === null ? "–" : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(2)} s`);

/** What keeps the server from its work; an empty text if nothing does. */
async function health() {
  try {
    const text = await getText("health");
    return text ? JSON.parse(text).status : "";
  } catch (error) {
    if (error instanceof Refused) return error.message;
    throw error;
  }
}

export class Live {
  /** @param onStatus gets a state (`ready`, `busy`, `lost`) and its text. */
  constructor(onStatus) {
    this.onStatus = onStatus;
    this.readings = [];
    const parent = document.getElementById("charts");
    const twoClasses = [["online", "online"], ["offline", "offline"]];
    const quantiles = [["P50", "online"], ["P99", "mixed"]];
    this.tokens = new Chart(parent, "Tokens generated per second", twoClasses, { stacked: true, format: short });
    this.steps = new Chart(parent, "Time in steps", KINDS.map((kind) => [kind, kind]), { stacked: true, most: 1, format: percent, axis: axisPercent });
    this.ttft = new Chart(parent, "Time to first token, online", quantiles, { format: time, axis: axisTime });
    this.gaps = new Chart(parent, "Gaps between tokens, online", quantiles, { format: time, axis: axisTime });
    this.blocks = TIERS.map(([tier, title]) => [tier, new Chart(parent, title, USES, { stacked: true, format: short })]);
    this.requests = new Chart(parent, "Requests that run or wait", twoClasses, { stacked: true, format: short });
    this.charts = [this.tokens, this.steps, this.ttft, this.gaps, ...this.blocks.map(([, chart]) => chart), this.requests];
  }

  /** Read for as long as the page is open; nothing while it is hidden. */
  async run() {
    for (;;) {
      if (!document.hidden) await this.read();
      await new Promise((resolve) => setTimeout(resolve, INTERVAL_MS));
    }
  }

  async read() {
    try {
      const text = await getText(METRICS);
      const status = await health();
      this.onStatus(status ? "busy" : "ready", status || "ready");
      this.show(new Reading(text, performance.now() / 1000));
      document.body.classList.remove("stale");
    } catch {
      const last = this.lastAt ? `; what is shown is of ${this.lastAt.toLocaleTimeString()}` : "";
      this.onStatus("lost", `no connection to the server${last}`);
      document.body.classList.add("stale");
      this.readings = []; // what happens until the next reading belongs to no second
    }
  }

  show(now) {
    this.lastAt = new Date();
    this.showTotals(now);
    if (now.sum("num_requests_running") === null) {
      this.readings = [];
      for (const chart of this.charts) chart.add(now.at, chart.series.map(() => null), { figure: "no engine runs" });
      return;
    }
    if (this.readings.length && hasRestarted(this.readings.at(-1), now)) this.readings = [];
    this.readings = [...this.readings.filter((each) => each.at > now.at - WINDOW_S), now];
    const [first, before] = [this.readings[0], this.readings.at(-2) ?? now];
    const since = (name, labels) => (before === now ? null : rate(before, now, name, labels));
    this.showTokens(now, since);
    this.showSteps(now, since, first);
    this.showLatency(this.ttft, first, now, "time_to_first_token_seconds", "ttft");
    this.showLatency(this.gaps, first, now, "inter_token_latency_seconds", "tpot");
    this.showBlocks(now);
    this.showRequests(now);
  }

  showTokens(now, since) {
    const values = CLASSES.map((each) => since("generation_tokens_total", { class: each }));
    const computed = since("iteration_tokens_total_sum");
    const words = `online ${whole(values[0])}, offline ${whole(values[1])}; computed with prompts ${whole(computed)}`;
    this.tokens.add(now.at, values, { figure: values[0] === null ? "not known yet" : words });
  }

  showSteps(now, since, first) {
    const shares = KINDS.map((kind) => since("step_seconds_sum", { kind }));
    const [seconds, count] = [growth(first, now, "step_seconds_sum"), growth(first, now, "step_seconds_count")];
    const tokens = growth(first, now, "iteration_tokens_total_sum");
    const mean = count ? `${time(seconds / count)} and ${plural(Math.round(tokens / count), "token")} a step` : "no steps";
    this.steps.add(now.at, shares, { figure: mean });
  }

  showLatency(chart, first, now, name, slo) {
    const values = [0.5, 0.99].map((q) => quantile(first, now, name, q, ONLINE));
    const objective = now.sum("slo_seconds", { slo });
    const [met, missed] = ["attained", "missed"].map((each) => now.sum(`slo_${each}_total`, { slo }) ?? 0);
    const share = met + missed ? met / (met + missed) : null;
    chart.add(now.at, values, {
      objective,
      figure: `P50 ${time(values[0])}, P99 ${time(values[1])}; objective ${time(objective)} met by ${percent(share)}`,
    });
  }

  showBlocks(now) {
    for (const [tier, chart] of this.blocks) {
      const values = USES.map(([use]) => now.sum("kv_tier_blocks", { tier, use }));
      const all = now.sum("kv_tier_blocks", { tier });
      const shares = values.map((value) => percent(all ? value / all : null));
      const figure = all === 0 ? "none" : `online ${shares[0]}, offline ${shares[1]}, cached ${shares[2]}`;
      chart.add(now.at, values, { figure });
    }
  }

  showRequests(now) {
    const by = (name) => CLASSES.map((each) => now.sum(name, { class: each }));
    const [running, waiting] = [by("num_requests_running"), by("num_requests_waiting")];
    const values = running.map((value, index) => (value === null ? null : value + waiting[index]));
    const words = CLASSES.map((each, index) => `${each} ${whole(running[index])} and ${whole(waiting[index])}`);
    this.requests.add(now.at, values, { figure: `running and waiting: ${words.join(", ")}` });
  }

  showTotals(now) {
    const rows = TOTALS.map(([words, name]) => {
      const row = html("tr", {}, html("th", { scope: "row", textContent: words }));
      row.append(...CLASSES.map((each) => html("td", { textContent: whole(now.sum(name, { class: each })) })));
      return row;
    });
    document.querySelector("#classes tbody").replaceChildren(...rows);
  }
}
