// Everything can be read without this: it only widens the timeline.
document.querySelectorAll(".bar-tools button").forEach(function (button) {
  button.addEventListener("click", function () {
    var box = button.closest(".card").querySelector(".scroll"), svg = box.querySelector("svg");
    var now = parseFloat(svg.style.width) || 100, next = button.dataset.zoom === "fit" ? 100 : now * parseFloat(button.dataset.zoom);
    next = Math.min(6400, Math.max(100, next));
    var middle = (box.scrollLeft + box.clientWidth / 2) / svg.clientWidth;
    svg.style.width = next + "%";
    box.scrollLeft = middle * svg.clientWidth - box.clientWidth / 2;
  });
});
