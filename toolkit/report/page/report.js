"use strict";
(() => {
  const { specs, config, failed } = JSON.parse(document.getElementById("charts").textContent);
  const options = { actions: false, renderer: "svg", ast: true, config, tooltip: { theme: "report" } };
  const drawn = [...document.querySelectorAll("[data-chart]")].map((place) =>
    vegaEmbed(place, specs[place.dataset.chart], options).catch((error) => {
      place.textContent = failed;
      console.error(error);
    })
  );
  Promise.all(drawn).then(() => document.documentElement.setAttribute("data-drawn", drawn.length));
})();
