// Islands: every training job of the run as it is now; looked at again every two seconds while anybody looks.

import { pictureAt, read } from "./api.js";
import { announce, drawn, element } from "./dom.js";
import { count, plural, span } from "./words.js";

const EVERY = 2000; // milliseconds
const OPENING = 15; // looks at the run after a job has ended: the server opens what it made a little later
const STATES = {
  done: "done",
  running: "training",
  stale: "silent",
  failed: "failed",
  proposed: "waits for admission",
  free: "waits for an island",
  missing: "not started",
};

export class IslandsView {
  constructor(studio) {
    this.studio = studio;
    this.jobs = new Map();
    this.looks = 0;
    this.said = element("p", { class: "intro" }, "Reading …");
    this.list = element("div", { class: "jobs" });
    this.node = element(
      "section",
      { class: "view", "aria-labelledby": "islands-title" },
      element("h1", { id: "islands-title", tabindex: -1 }, "Islands"),
      this.said,
      this.list,
    );
    document.addEventListener("visibilitychange", () => this.watching && !document.hidden && this.look());
  }

  open() {
    this.watching = true;
    this.look();
  }

  close() {
    this.watching = false;
    clearTimeout(this.timer);
  }

  refresh() {}

  async look() {
    try {
      const { jobs, why } = await read("/v1/islands");
      this.draw(jobs, why);
    } catch (error) {
      this.said.textContent = error.message;
    }
    clearTimeout(this.timer); // of a look that was begun meanwhile
    if (this.watching && !document.hidden) this.timer = setTimeout(() => this.look(), EVERY);
  }

  draw(jobs, why) {
    const done = jobs.filter(({ state }) => state === "done").length;
    this.said.textContent = why ?? summary(jobs, done);
    if (this.done !== undefined && done > this.done) {
      announce(this.said.textContent);
      this.looks = OPENING;
    }
    if (this.looks-- > 0) this.studio.reload();
    this.done = done;
    for (const job of jobs) {
      if (!this.jobs.has(job.job)) {
        const card = new JobCard(job.job);
        this.jobs.set(job.job, card);
        this.list.append(card.node);
      }
      const expert = this.studio.run.experts.find(({ name }) => name === job.job);
      this.jobs.get(job.job).draw(job, expert?.colour ?? "var(--accent)");
    }
  }
}

function summary(jobs, done) {
  const running = jobs.filter(({ state }) => state === "running");
  const left = Math.max(...running.map(({ seconds_left: seconds }) => seconds ?? 0));
  const all = `All ${jobs.length} networks are trained.`;
  const parts = [
    done === jobs.length ? all : `${done} of ${plural(jobs.length, "network")} trained.`,
    running.length > 0 && `${running.length} in training${left > 0 ? `, about ${span(left)} left` : ""}.`,
  ];
  return parts.filter(Boolean).join(" ");
}

/** One job; it is drawn again in place, so that neither the focus nor the eye loses it. */
class JobCard {
  constructor(job) {
    this.state = element("span", { class: "state" });
    this.bar = element("progress", { "aria-label": `Samples of ${job}` });
    this.facts = element("p", { class: "facts" });
    this.why = element("p", { class: "problem" });
    this.line = drawn("svg", { class: "spark", viewBox: "0 0 120 32", preserveAspectRatio: "none", role: "img" });
    this.loss = element("figcaption", {});
    this.curve = element("figure", { class: "loss", hidden: true }, this.line, this.loss);
    this.grid = element("img", { alt: `Newest samples of ${job}`, class: "sheet", hidden: true });
    this.node = element(
      "article",
      { class: "job", "aria-label": job },
      element("header", {}, element("h2", {}, job), this.state),
      this.bar,
      this.facts,
      this.why,
      this.curve,
      this.grid,
    );
  }

  draw(job, colour) {
    this.node.dataset.state = job.state;
    this.node.style.setProperty("--expert", colour);
    this.state.textContent = STATES[job.state] ?? job.state;
    this.bar.hidden = !job.total || job.state === "done";
    this.bar.max = job.total || 1;
    this.bar.value = job.samples;
    this.facts.textContent = said(job);
    this.why.textContent = job.why;
    this.drawLoss(job.loss ?? []);
    this.drawGrid(job.grid);
  }

  drawLoss(points) {
    this.curve.hidden = points.length < 2;
    if (this.curve.hidden) return;
    const newest = points.at(-1)[1].toPrecision(3);
    this.line.replaceChildren(drawn("path", { d: curve(points), "vector-effect": "non-scaling-stroke" }));
    this.line.setAttribute("aria-label", `Loss from ${points[0][1].toPrecision(3)} to ${newest}`);
    this.loss.textContent = `loss ${newest}`;
  }

  async drawGrid(path) {
    if (!path || path === this.path) return;
    this.path = path;
    const old = this.grid.src;
    this.grid.src = await pictureAt(path);
    this.grid.hidden = false;
    if (old) URL.revokeObjectURL(old);
  }
}

function said({ samples, total, rate, seconds_left: left, seen_seconds_ago: seen, where, state }) {
  const open = state !== "done" && total > 0;
  const progress = open ? `${count(samples)} of ${count(total)} samples` : plural(samples, "sample");
  const parts = [
    samples > 0 && progress,
    rate && state === "running" ? `${rate.toFixed(1)} a second` : null,
    left === null ? null : `${span(left)} left`,
    state === "stale" && seen !== null ? `last seen ${span(seen)} ago` : null,
    where,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** The path of a loss curve in a box of 120 x 32. */
function curve(points) {
  const [times, losses] = [points.map(([time]) => time), points.map(([, loss]) => loss)];
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const x = (time) => (120 * (time - times[0])) / (times.at(-1) - times[0] || 1);
  const y = (loss) => 30 - (28 * (loss - low)) / (high - low || 1);
  return `M${points.map(([time, loss]) => `${x(time).toFixed(1)} ${y(loss).toFixed(1)}`).join("L")}`;
}
