package publisher

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Readers that ask without end get an answer in 2 ms each, and not one for each question. The first is at once.
func TestAnswersToReadersArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		asked := make(chan struct{})
		close(asked) // it can always be received from
		began := time.Now()
		answers := paced(ctx, asked)
		<-answers
		if took := time.Since(began); took > 0 {
			t.Errorf("the first answer comes after %v", took)
		}
		for range 100 {
			<-answers
		}
		if took := time.Since(began); took != 100*askPace {
			t.Errorf("100 further answers take %v", took)
		}
	})
}
