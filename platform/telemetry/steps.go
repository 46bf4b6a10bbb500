package telemetry

import (
	"context"
	"slices"
	"time"

	utiltrace "k8s.io/utils/trace"
)

const (
	// StepsVerbosity is the verbosity from which slow requests are logged (k8s.io/utils/trace).
	StepsVerbosity = 2
	// SlowRequest is kube-apiserver's least duration of a request whose steps are logged.
	SlowRequest = 500 * time.Millisecond
	// slowStep is the least duration of a step that a client can repeat. It bounds the number of these steps.
	slowStep = time.Millisecond
)

// Steps are the steps of a request, or of a call at its server. Its methods do nothing if it is nil.
type Steps struct{ trace *utiltrace.Trace }

// StartSteps starts the steps of a request, which End logs if the request is slow. The steps that other functions add
// to the context belong to it. Below StepsVerbosity it returns ctx and nil.
func StartSteps(ctx context.Context, name string, keysAndValues ...string) (context.Context, *Steps) {
	if !Verbose(StepsVerbosity) {
		return ctx, nil
	}
	var fields []utiltrace.Field
	for pair := range slices.Chunk(keysAndValues, 2) {
		value := pair[1]
		if len(value) > maxValueBytes {
			value = truncate(value, maxValueBytes)
		}
		fields = append(fields, utiltrace.Field{Key: pair[0], Value: value})
	}
	t := utiltrace.New(name, fields...)
	return utiltrace.ContextWithTrace(ctx, t), &Steps{t}
}

// End ends the steps, and logs them if the request was slow.
func (s *Steps) End() {
	if s != nil {
		s.trace.LogIfLong(SlowRequest)
	}
}

// AddStep adds a step that ends now to ctx's request, if it has steps.
func AddStep(ctx context.Context, name string) {
	if !Verbose(StepsVerbosity) {
		return
	}
	if t := utiltrace.FromContext(ctx); t != nil {
		t.Step(name)
	}
}

// AddSlowStep is AddStep for a step that began at since, if it was not short.
func AddSlowStep(ctx context.Context, name string, since time.Time) {
	if time.Since(since) >= slowStep {
		AddStep(ctx, name)
	}
}
