// Prometheus text, and what two readings of it tell.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One reading of /metrics; `at` is in seconds. */
export class Reading {
  constructor(text, at) {
    this.at = at;
    this.samples = new Map();
    for (const line of text.split("\n")) {
      const found = line[0] === "#" ? null : LINE.exec(line);
      if (!found) continue;
      const name = found[1].replace(/^backfill:/, "");
      const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map((each) => [each[1], each[2]]));
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
    }
  }

  matching(name, labels = {}) {
    const wanted = Object.entries(labels);
    return (this.samples.get(name) ?? []).filter((each) => wanted.every(([label, value]) => each.labels[label] === value));
  }

  /** The sum of the samples that have these labels; null if there are none. */
  sum(name, labels) {
    const found = this.matching(name, labels);
    return found.length ? found.reduce((total, each) => total + each.value, 0) : null;
  }

  /** Counts by upper bound of a histogram's bucket. */
  buckets(name, labels) {
    const counts = new Map();
    for (const { labels: own, value } of this.matching(`${name}_bucket`, labels)) {
      const bound = Number(own.le.replace("Inf", "Infinity"));
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return counts;
  }
}

/** Whether another server answers than before: its histograms have counted less. */
export function hasRestarted(before, after) {
  const names = [...before.samples.keys()].filter((name) => name.endsWith("_bucket")).map((name) => name.slice(0, -7));
  return names.some((name) => {
    const counts = after.buckets(name);
    return [...before.buckets(name)].some(([bound, count]) => !(counts.get(bound) >= count));
  });
}

/** The growth of a counter between two readings; null without both, or if it began anew between them. */
export function growth(before, after, name, labels) {
  const [from, to] = [before.sum(name, labels), after.sum(name, labels)];
  return from === null || to === null || to < from ? null : to - from;
}

/** Growth per second. */
export function rate(before, after, name, labels) {
  const grown = growth(before, after, name, labels);
  return grown === null ? null : grown / (after.at - before.at);
}

/** Quantile `q` of what a histogram counted between two readings, linear within a bucket; null if nothing. */
export function quantile(before, after, name, q, labels) {
  const earlier = before.buckets(name, labels);
  const counts = [...after.buckets(name, labels)].sort((a, b) => a[0] - b[0]);
  const grown = counts.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = grown.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of grown) {
    if (count >= q * total) {
      return bound === Infinity ? low : low + ((bound - low) * (q * total - below)) / (count - below || 1);
    }
    [low, below] = [bound, count];
  }
  return low;
}
