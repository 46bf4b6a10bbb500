package process

import (
	"testing"
	"time"
)

func TestFormats(t *testing.T) {
	for seconds, want := range map[float64]string{0: "-", .000128: "≤ 0.13 ms", .008192: "≤ 8.2 ms", .262144: "≤ 262 ms",
		1.048576: "≤ 1.0 s", 1073: "≤ 1073.0 s"} {
		if got := FormatP99(seconds); got != want {
			t.Errorf("%v: %s, want %s", seconds, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		119 * time.Second: "119s", 2 * time.Minute: "2m", 47 * time.Hour: "47h", 48 * time.Hour: "2d",
	} {
		if got := FormatAge(d); got != want {
			t.Errorf("%v: %s, want %s", d, got, want)
		}
	}
}
