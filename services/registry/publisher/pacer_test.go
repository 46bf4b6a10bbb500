package publisher

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// Readers that request progress in a loop get a response every 2 ms, the first without a delay.
func TestAnswersToReadersArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		requests := make(chan struct{})
		close(requests) // a receive always succeeds
		began := time.Now()
		answers := paced(ctx, requests)
		<-answers
		if took := time.Since(began); took > 0 {
			t.Errorf("the first response comes after %v", took)
		}
		for range 100 {
			<-answers
		}
		if took := time.Since(began); took != 100*progressResponsePeriod {
			t.Errorf("100 further responses take %v", took)
		}
	})
}
