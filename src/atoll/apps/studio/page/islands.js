// The view Islands: the state of every training job, updated every two seconds while the view is visible.

import { getJson, imageUrl } from "./api.js";
import { announce, element, svgElement } from "./dom.js";
import { count, duration, plural } from "./format.js";

const UPDATE_MILLISECONDS = 2000; // as often as the server scans for trained networks
// Updates after a job has ended that also reload the run: the server loads the new network some seconds later.
const RELOADS = 15;
const STATES = {
  done: "done",
  running: "training",
  stale: "no heartbeat",
  failed: "failed",
  proposed: "waiting for admission",
  free: "waiting for an island",
  missing: "not started",
};

export class IslandsView {
  constructor(studio) {
    this.studio = studio;
    this.jobs = new Map();
    this.reloads = 0;
    this.intro = element("p", { class: "intro" }, "Loading …");
    this.list = element("div", { class: "jobs" });
    this.node = element(
      "section",
      { class: "view", "aria-labelledby": "islands-title" },
      element("h1", { id: "islands-title", tabindex: -1 }, "Islands"),
      this.intro,
      this.list,
    );
    document.addEventListener("visibilitychange", () => this.visible && !document.hidden && this.update());
  }

  open() {
    this.visible = true;
    this.update();
  }

  close() {
    this.visible = false;
    clearTimeout(this.timer);
  }

  refresh() {}

  async update() {
    try {
      const { jobs, reason } = await getJson("/v1/islands");
      this.draw(jobs, reason);
    } catch (error) {
      this.intro.textContent = error.message;
    }
    clearTimeout(this.timer); // another update may have started meanwhile
    if (this.visible && !document.hidden) this.timer = setTimeout(() => this.update(), UPDATE_MILLISECONDS);
  }

  draw(jobs, reason) {
    const done = jobs.filter(({ state }) => state === "done").length;
    this.intro.textContent = reason ?? summary(jobs, done);
    if (this.done !== undefined && done > this.done) {
      announce(this.intro.textContent);
      this.reloads = RELOADS;
    }
    if (this.reloads-- > 0) this.studio.reload();
    this.done = done;
    for (const job of jobs) {
      if (!this.jobs.has(job.job)) {
        const card = new JobCard(job.job);
        this.jobs.set(job.job, card);
        this.list.append(card.node);
      }
      const expert = this.studio.run.experts.find(({ name }) => name === job.job);
      this.jobs.get(job.job).draw(job, expert?.color ?? "var(--accent)");
    }
  }
}

function summary(jobs, done) {
  const running = jobs.filter(({ state }) => state === "running");
  const left = Math.max(...running.map(({ seconds_left: seconds }) => seconds ?? 0));
  const parts = [
    done === jobs.length ? `All ${jobs.length} networks are trained.` : `${done} of ${plural(jobs.length, "network")} trained.`,
    running.length > 0 && `${running.length} in training${left > 0 ? `, about ${duration(left)} left` : ""}.`,
  ];
  return parts.filter(Boolean).join(" ");
}

/** The card of one job. It is updated in place, which keeps the focus and the scroll position. */
class JobCard {
  constructor(job) {
    this.state = element("span", { class: "state" });
    this.bar = element("progress", { "aria-label": `Progress of ${job}` });
    this.info = element("p", { class: "info" });
    this.reason = element("p", { class: "problem" });
    this.line = svgElement("svg", { class: "loss-curve", viewBox: "0 0 120 32", preserveAspectRatio: "none", role: "img" });
    this.lossText = element("figcaption", {});
    this.loss = element("figure", { class: "loss", hidden: true }, this.line, this.lossText);
    this.grid = element("img", { alt: `Newest images of ${job}`, class: "sheet", hidden: true });
    this.node = element(
      "article",
      { class: "job", "aria-label": job },
      element("header", {}, element("h2", {}, job), this.state),
      this.bar,
      this.info,
      this.reason,
      this.loss,
      this.grid,
    );
  }

  draw(job, color) {
    this.node.dataset.state = job.state;
    this.node.style.setProperty("--expert", color);
    this.state.textContent = STATES[job.state] ?? job.state;
    this.bar.hidden = !job.total_images || job.state === "done";
    this.bar.max = job.total_images || 1;
    this.bar.value = job.images;
    const info = infoText(job);
    // The island by its host; its process, its launch and its key are in the tooltip.
    const host = job.where && element("span", { title: job.where }, job.where.split(/[: ]/)[0]);
    this.info.replaceChildren(info, info && host ? " · " : "", host);
    this.reason.textContent = job.reason;
    this.drawLoss(job.loss ?? []);
    this.drawGrid(job.grid);
  }

  drawLoss(points) {
    this.loss.hidden = points.length < 2;
    if (this.loss.hidden) return;
    const newest = points.at(-1)[1].toPrecision(3);
    this.line.replaceChildren(svgElement("path", { d: lossPath(points), "vector-effect": "non-scaling-stroke" }));
    this.line.setAttribute("aria-label", `Loss from ${points[0][1].toPrecision(3)} to ${newest}`);
    this.lossText.textContent = `loss ${newest}`;
  }

  async drawGrid(path) {
    if (!path || path === this.path) return;
    this.path = path;
    const old = this.grid.src;
    this.grid.src = await imageUrl(path);
    this.grid.hidden = false;
    if (old) URL.revokeObjectURL(old);
  }
}

function infoText(job) {
  const { images, total_images: total, images_per_second: rate, seconds_left: left, state } = job;
  const { last_seen_seconds_ago: seen } = job;
  const open = state !== "done" && total > 0;
  const progress = open ? `${count(images)} of ${count(total)} images` : plural(images, "image");
  const parts = [
    images > 0 && progress,
    rate && state === "running" ? `${rate.toFixed(1)} images/s` : null,
    left === null ? null : `${duration(left)} left`,
    state === "stale" && seen !== null ? `last seen ${duration(seen)} ago` : null,
  ];
  return parts.filter(Boolean).join(" · ");
}

/** Return the path of a loss curve in a box of 120 x 32, with a margin of 2 for the stroke. */
function lossPath(points) {
  const [images, losses] = [points.map(([seen]) => seen), points.map(([, loss]) => loss)];
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const x = (seen) => (120 * (seen - images[0])) / (images.at(-1) - images[0] || 1);
  const y = (loss) => 30 - (28 * (loss - low)) / (high - low || 1);
  return `M${points.map(([seen, loss]) => `${x(seen).toFixed(1)} ${y(loss).toFixed(1)}`).join("L")}`;
}
