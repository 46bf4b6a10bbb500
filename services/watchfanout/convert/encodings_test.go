package convert

import (
	"testing"
	"testing/synctest"
	"time"

	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/form"
)

func TestEncodingsAreKeptForTheirLifeAndWithinBounds(t *testing.T) {
	// The sleeps are synctest's: its clock moves, nobody waits.
	synctest.Test(t, func(t *testing.T) {
		e := &encodings{life: time.Second, limit: 1000}
		item := &cache.Item{Key: "a"}
		k := encodingKey{item, form.Key{Event: "x"}}
		e.put(k, []byte("row"))
		time.Sleep(400 * time.Millisecond)
		if v, ok := e.get(k); !ok || string(v) != "row" {
			t.Errorf("%q %v", v, ok)
		}
		if _, ok := e.get(encodingKey{item, form.Key{Event: "y"}}); ok {
			t.Error("another form is the same")
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if _, ok := e.get(k); ok {
			t.Error("it outlives its life")
		}
		if e.timer != nil || e.old != nil || e.young != nil {
			t.Error("it is not empty in the end")
		}
		e.put(k, make([]byte, 2000))
		if _, ok := e.get(k); ok {
			t.Error("more than the limit is kept")
		}
		e.put(k, []byte("x"))
		time.Sleep(2 * time.Second)
	})
}
