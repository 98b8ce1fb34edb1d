// The site's search runs in a worker, and browsers start none for pages that are opened as files.
// There a hidden frame of the same origin does the work. The offline plugin would load such a script
// from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      this.ready = new Promise((resolve) => {
        inside.document.open();
        inside.document.write("<!doctype html><html><head></head><body></body></html>");
        inside.document.close();
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
        inside.importScripts = (...urls) =>
          urls.reduce(
            (before, next) => before.then(() => this.load(inside, next)),
            Promise.resolve()
          );
        resolve(this.load(inside, new URL(url, location.href).href));
      });
      this.inside = inside;
      this.frame = frame;
    }

    load(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        inside.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.ready.then(() =>
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
      );
    }

    terminate() {
      this.frame.remove();
    }
  };
}
