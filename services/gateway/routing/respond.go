package routing

import (
	"context"
	"net/http"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/answer"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/wire"
)

// fail answers an error, with what came beside it.
func (c *call) fail(err error) {
	warnings.Forward(c.req.Context(), rpc.Warnings(err))
	audit.Follow(c.req.Context(), rpc.AuditContextOf(err), c.body)
	answer.Error(c.w, c.req, c.groupVersion(), rpc.WithoutDetails(err))
}

// respond answers what registry has answered.
func (c *call) respond(resp *registryv1.ObjectResponse) {
	ctx := c.req.Context()
	warnings.Forward(ctx, resp.Warnings)
	audit.Follow(ctx, resp.Audit, c.body)
	if audit.Responds(ctx) {
		audit.Response(ctx, c.out.MediaType, resp.Body)
	}
	to := body.NewWriter(c.w, c.req, c.out.MediaType, int(resp.Code), int64(len(resp.Body)))
	_, _ = to.Write(resp.Body)
	_ = to.Close()
}

// directAbove is the size from which a body is written past the HTTP/2 server, which copies and frames it piece by
// piece.
const directAbove = 64 << 10

// begin begins the answer whose first chunk there is, and says how to write it and how to end it.
func (c *call) begin(first *rpc.Chunk) (write func([][]byte) error, end func()) {
	ctx := c.req.Context()
	if audit.Responds(ctx) {
		return c.recorded(ctx, first.Size)
	}
	stream := wire.Of(c.req)
	compress := !first.Gzip && body.Compressed(c.req, first.Size)
	direct := stream != nil && first.Size > directAbove && !compress
	var to *body.Writer
	if first.Gzip || direct {
		to = body.NewEncoded(c.w, c.out.MediaType, http.StatusOK, first.Gzip)
	} else {
		to = body.NewWriter(c.w, c.req, c.out.MediaType, http.StatusOK, first.Size)
	}
	if direct && http.NewResponseController(c.w).Flush() == nil && stream.Hijack(ctx, 0) {
		patience := c.router.Tier.Watches.Config.WriteTimeout
		return func(parts [][]byte) error {
			return stream.Write(ctx, patience, parts...)
		}, func() { _ = stream.Finish(ctx) }
	}
	return func(parts [][]byte) error {
		for _, p := range parts {
			if _, err := to.Write(p); err != nil {
				return err
			}
		}
		return nil
	}, func() { _ = to.Close() }
}

// recorded is begin for an answer that is audited whole.
func (c *call) recorded(ctx context.Context, size int64) (write func([][]byte) error, end func()) {
	whole := make([]byte, 0, max(size, 0))
	return func(parts [][]byte) error {
			for _, p := range parts {
				whole = append(whole, p...)
			}
			return nil
		}, func() {
			c.respond(&registryv1.ObjectResponse{Code: http.StatusOK, Body: whole})
		}
}
