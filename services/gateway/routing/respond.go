package routing

import (
	"errors"
	"net/http"

	"k8s.io/apiserver/pkg/warning"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/answer"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/wire"
)

// fail answers an error, with the warnings that came with it.
func (c *call) fail(err error) {
	var warned *rpc.WarnedError
	if errors.As(err, &warned) {
		for _, t := range warned.Warnings {
			warning.AddWarning(c.req.Context(), "", t)
		}
		err = warned.Unwrap()
	}
	answer.Error(c.w, c.req, c.groupVersion(), err)
}

// respond answers what registry has answered.
func (c *call) respond(resp *registryv1.ObjectResponse) {
	for _, t := range resp.Warnings {
		warning.AddWarning(c.req.Context(), "", t)
	}
	to := body.NewWriter(c.w, c.req, c.out.MediaType, int(resp.Code), int64(len(resp.Body)))
	_, _ = to.Write(resp.Body)
	_ = to.Close()
}

// directAbove is the size from which a body is written past the HTTP/2 server, which copies and frames it piece by
// piece.
const directAbove = 64 << 10

// begin begins an answer of some size and says how to write it and how to end it.
func (c *call) begin(size int64) (write func([][]byte) error, end func()) {
	ctx := c.req.Context()
	if stream := wire.Of(c.req); stream != nil && size > directAbove && !body.Compressed(c.req, size) {
		c.w.Header().Set("Content-Type", c.out.MediaType)
		c.w.WriteHeader(http.StatusOK)
		if http.NewResponseController(c.w).Flush() == nil && stream.Hijack(ctx, 0) {
			patience := c.router.Tier.Watches.Config.WriteTimeout
			return func(parts [][]byte) error {
				return stream.Write(ctx, patience, parts...)
			}, func() { _ = stream.Finish(ctx) }
		}
	}
	to := body.NewWriter(c.w, c.req, c.out.MediaType, http.StatusOK, size)
	return func(parts [][]byte) error {
		for _, p := range parts {
			if _, err := to.Write(p); err != nil {
				return err
			}
		}
		return nil
	}, func() { _ = to.Close() }
}
